"""The federated example learns its digits, by the command that its first lines name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "federated" / "digits.py"
pytestmark = [pytest.mark.ranks, pytest.mark.needs_library("sklearn")]


def torsh_federated(*args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "torsh_distributed.cli.entry_point", "federated", *args],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_simulation_learns_the_digits(tmp_path: Path) -> None:
    command = ["simulate", str(EXAMPLE), "--clients", "100", "--output", str(tmp_path / "run")]
    lines = torsh_federated(*command).splitlines()
    last = next(line for line in lines if line.startswith("round 14:"))
    assert "10 of 10 clients" in last
    assert float(last.split("accuracy ")[1].split()[0]) > 0.85
    assert (tmp_path / "run" / "model.pt").exists()
