from __future__ import annotations

import json
import re
from pathlib import Path

from tests.observe.packets import FakeRank, job_of_two
from torsh_distributed.observe.job.page_state import page_state
from torsh_distributed.observe.page.html_report import html_report, write_report

ATTACK = "</script><script>alert(1)</script><!--"


def test_the_report_is_one_file_with_the_state_in_it(tmp_path: Path) -> None:
    state = page_state(job_of_two(5))
    path = write_report(tmp_path / "deep" / "report.html", state)
    text = path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert not re.search(r'(src|href)="(?!data:|#)', text), "nothing is loaded"
    assert "http://www.w3.org/2000/svg" in text
    (data,) = re.findall(r'<script type="application/json" id="state">(.*?)</script>', text, re.DOTALL)
    assert json.loads(data)["curve"] == state["curve"]
    assert "sha256-" in text
    assert sorted(file.name for file in path.parent.iterdir()) == ["report.html"]


def test_text_of_a_job_cannot_become_markup() -> None:
    view = job_of_two(3)
    view.take({"type": "job", "run_id": ATTACK, "command": ATTACK})
    rank = FakeRank(0, node=ATTACK)
    rank.step()
    rank.collector.metrics.custom("x", help=ATTACK, unit="<b>").record(1)
    rank.collector.metrics("torsh_collectives", ATTACK).record(1)
    packet = rank.packet()
    packet["marks"] = [{"type": ATTACK, "time": 1.0, ATTACK: ATTACK}]
    packet["facts"][ATTACK] = ATTACK
    view.take(packet)
    text = html_report(page_state(view))
    assert text.count("<script") == 2, "its own two, and none of the job's"
    assert "<!--" not in text
    assert "innerHTML" not in text
