"""The page in a real Chromium: what is drawn is read back from the document."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.observe.packets import FakeRank, job_of_two
from torsh_distributed.observe.job.page_state import page_state
from torsh_distributed.observe.page.html_report import write_report

pytestmark = [pytest.mark.needs_browser, pytest.mark.ranks]


def document_of(path: Path, folder: Path) -> str:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={folder}/profile",
        "--dump-dom",
    ]
    done = subprocess.run([*command, f"file://{path}"], capture_output=True, text=True, timeout=90)
    return done.stdout


def test_the_report_draws_every_view_and_runs_nothing_of_the_jobs(tmp_path: Path) -> None:
    view = job_of_two(10, slowdown=1.5)
    attack = "<img src=x onerror=document.body.dataset.attacked=1>"
    view.take({"type": "job", "run_id": attack, "command": attack})
    rank = FakeRank(0, node=attack)
    packet = rank.packet()
    packet["facts"]["mesh"] = {"dp": 2, "tp": 1}
    packet["marks"] = [{"type": "checkpoint", "time": 1.0, "action": "saved", "step": 5, "path": attack}]
    view.take(packet)
    text = document_of(write_report(tmp_path / "report.html", page_state(view)), tmp_path)
    assert 'data-drawn="1"' in text
    assert "data-attacked" not in text
    assert 'data-points="10"' in text
    assert re.findall(r'data-rank="(\d+)"', text) == ["0", "1"]
    assert re.search(r'data-part="wait" data-seconds="0\.01', text)
    assert "rank 1 is 50 % slower than the others" in text
    assert "all_reduce" in text
    assert "dp 2 × tp 1 = 2 ranks" in text
    assert "&lt;img src=x" in text
