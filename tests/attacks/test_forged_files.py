"""Forged files of every format: nothing outside of their directory is opened, and no reader ends in a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.ranks]  # a fresh interpreter: its audit hook cannot be removed


def hunted(num: int, seed: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.attacks.forging.hunt", "--num", str(num), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True)
    report: dict[str, Any] = json.loads(done.stdout or "null") or {"error": done.stderr[-2000:]}
    return report


def check(report: dict[str, Any], num: int) -> None:
    assert report.get("num_files") == num, report
    assert report["opened_outside"] == []
    assert report["tracebacks"] == []
    # Lines of events that are damaged are passed over; of all else most forgeries are refused.
    assert all(count for name, count in report["num_refused"].items() if name != "events")
    assert report["most_memory_mb"] < 4000


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_forged_files_are_refused_in_words() -> None:
    check(hunted(45, seed=7), 45)


@pytest.mark.matrix
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(10))
def test_ten_thousand_forged_files(seed: int) -> None:
    check(hunted(1000, seed=100 + seed), 1000)
