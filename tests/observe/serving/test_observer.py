"""The observer of a job whose surroundings fail: full disks, a dead webhook, nonsense from ranks, clocks that jump."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

from tests.observe.packets import FakeRank
from torsh_distributed.observe.metrics.step_record import StepRecord, pack_steps
from torsh_distributed.observe.page.html_report import html_report
from torsh_distributed.observe.serving.observer import Observer
from torsh_distributed.observe.settings import ObserveSettings

RULES = """
[[rule]]
name = "always"
metric = "torsh_loss"
operator = ">"
value = -1
actions = ["log", "dead"]
[action.dead]
kind = "webhook"
url = "http://127.0.0.1:9/hook"
"""


def test_full_disks_dead_hooks_nonsense_and_clocks_that_jump_are_told_and_the_job_is_still_seen(tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text(RULES)
    settings = ObserveSettings(
        exports=("jsonl:/dev/full", "csv:/dev/full"),
        report="/proc/report.html",
        alert_rules=str(tmp_path / "rules.toml"),
    )
    told: list[str] = []
    has_told = threading.Event()

    def tell(kind: str, text: str) -> None:
        told.append(f"{kind}: {text}")
        if sum("does not work" in one for one in told) >= 2 and any("alert (warning) always" in one for one in told):
            has_told.set()

    observer = Observer(settings, tell)
    observer.start()
    rank = FakeRank(0)
    for number in range(8):
        rank.step()
        packet: dict[str, Any] = rank.packet()
        packet["time"] += (-1) ** number * 1e6  # its wall clock is set back and forth
        observer.take(packet)
    bad = rank.packet()
    bad["steps"] = pack_steps(
        StepRecord(step, 1.0, seconds, *[None] * 6, 0.0, 1.0, 1) for step, seconds in ((9, math.nan), (10, math.inf))
    )
    bad["marks"] = [{"type": "log", "time": 5.0, "level": math.inf}, {"type": "log", "time": math.nan}]
    bad["facts"] = {"node": "a", "load": math.nan}
    bad["metrics"] = [["torsh_loss", [], math.nan], ["torsh_step", [], 8]]
    observer.take(bad)
    observer.take(rank.packet())
    assert has_told.wait(60), told
    observer.close()
    assert [one for one in told if one.startswith("warned: the export jsonl:/dev/full does not work")]
    assert len([one for one in told if "/dev/full does not work" in one]) == 2, "each is told once"
    assert any("the report does not work" in one for one in told)
    state = observer.state()
    assert json.loads(json.dumps(state, allow_nan=False))["job"]["step"] == 8
    assert "NaN" not in html_report(state)
    assert [row["name"] for row in state["incidents"] if row["type"] == "alert"] == ["always"]
    assert observer.view.num_dropped >= 2
