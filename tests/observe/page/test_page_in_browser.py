"""The page in a real Chromium: every view is read back from the document, and used with mouse and keyboard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.observe.packets import FakeRank
from tests.observe.page.chromium import Chromium
from torsh_distributed import events
from torsh_distributed.observe.job.job_view import JobView
from torsh_distributed.observe.job.page_state import page_state
from torsh_distributed.observe.page.html_report import write_report
from torsh_distributed.observe.page.page_routes import PageFeed, page_routes
from torsh_distributed.observe.serving.guarded_server import GuardedServer

pytestmark = [pytest.mark.needs_browser, pytest.mark.ranks]

ATTACK = "<img src=x onerror=document.body.dataset.attacked=1>"


class FullJob:
    """Four ranks in two stages, of which the second is slow; everything that the page can show."""

    def __init__(self) -> None:
        self.view = JobView()
        self.view.take({"type": "job", "run_id": ATTACK, "command": "train.py", "world_size": 4, "num_nodes": 1})
        self.ranks = [FakeRank(number, node=ATTACK) for number in range(4)]
        self.num_steps = 0
        self.acknowledged: list[str] = []
        self.train(30)

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.num_steps += 1
            for number, rank in enumerate(self.ranks):
                compute_s = 0.03 if number == 1 else 0.02
                rank.step(compute_s=compute_s, wait_s=0.035 - compute_s, loss=3.0 - 0.05 * self.num_steps)
        for number, rank in enumerate(self.ranks):
            rank.collector.metrics.custom("accuracy", unit="share", help=ATTACK).record(number / 10)
            rank.collector.metrics("torsh_node_load").record(1.5)
            rank.collector.metrics("torsh_host_memory_bytes").record(2**30)
            rank.collector.note_operations(3_000_000_000, 1e12)
            sent = {"num_bytes": 10**6, "duration_s": 0.01, "codec": "topk:0.1", "wire_bytes": 10**5}
            rank.collector.take(events.BucketEvent(step=1, index=0, **sent), now_s=100.0)  # type: ignore[arg-type]
            packet = rank.packet()
            packet["facts"] |= {"world_size": 4, "mesh": {"dp": 2, "pp": 2, "tp": 1}}
            if number == 0:
                saved = {"type": "checkpoint", "time": 1.0, "action": "saved", "step": 5, "path": ATTACK}
                evaluated = {"type": "evaluation", "time": 1.0, "step": 5, "loss": 2.875}
                packet["marks"] = [{**saved, "num_bytes": 2**20, "duration_s": 0.5}, evaluated]
            self.view.take(packet)
        counted = {"type": "energy", "time": 9e8, "rank": -1, "node": 0, "meter": ATTACK, "source": "estimate"}
        self.view.take({**counted, "is_measured": False, "joules": 500.0, "duration_s": 2.0, "detail": ATTACK})
        decided = {"type": "schedule", "time": 9e8, "rank": -1, "action": "hold", "workers": 0, "reason": ATTACK}
        self.view.take({**decided, "deadline": 9.1e8, "resumes_at": 9.01e8})
        spent = {"type": "budget", "time": 9e8, "rank": -1, "name": "CO2", "spent": 0.9, "limit": 1.0}
        self.view.take({**spent, "unit": "kg", "action": "warn"})
        given = {"type": "federated_round", "time": 9e8, "rank": -1, "round": 0, "num_chosen": 10, "num_updates": 9}
        given |= {"num_attempts": 1, "failures": {ATTACK: 1}, "figures": {ATTACK: 0.5}, "num_planned": 3}
        self.view.take({**given, "bytes_up": 1000, "bytes_down": 2000, "duration_s": 1.5, "epsilon": 2.25})

    def state(self) -> dict[str, Any]:
        alert = {"id": "a-1", "name": ATTACK, "severity": "critical", "message": "memory", "time": 1.0}
        anomaly = {"kind": "memory_leak", "severity": 7.0, "message": ATTACK, "time": 1.0, "rank": 1, "step": 3}
        alert["is_acknowledged"] = "a-1" in self.acknowledged
        return page_state(self.view, alerts=[alert], anomalies=[anomaly])

    def acknowledge(self, name: str) -> bool:
        self.acknowledged.append(name)
        return True


def check_every_view(browser: Chromium) -> None:
    assert browser.text("#summary").startswith("running · train.py · 4 ranks on 1 node · torsh")
    assert "rank 1 is 50 % slower than the others" in browser.text("#summary")
    figures = browser.text("#figures")
    assert "30" in figures.split()
    assert "35.0 ms" in figures
    assert "2.875" in figures
    assert browser.ask("document.querySelectorAll('#loss [data-dot]').length") == 1
    assert "codec topk" in browser.text("#rates")
    for chart, num_points in (("loss", "30"), ("rate", "29")):  # without the time of the first step
        assert browser.ask(f"document.querySelector('#{chart} [data-points]').dataset.points") == num_points
    assert browser.ask("document.querySelectorAll('#ranks [data-rank]').length") == 4
    parts = browser.ask("[...document.querySelectorAll('#parts [data-part]')].map((one) => one.dataset.part)")
    assert parts == ["forward", "backward", "optimizer", "wait", "data", "other"]
    assert "all_reduce" in browser.text("#operations")
    assert "load imbalance" in browser.text("#bottlenecks")
    assert "make rank 1 as fast as the others" in browser.text("#recommendations")
    assert browser.text("#waits tbody tr").split()[0] == "1", "the rank that others wait for comes first"
    assert browser.ask("document.querySelectorAll('#timeline rect').length") > 12
    assert "dp 2 × pp 2 × tp 1 = 4 ranks" in browser.text("#mesh")
    assert browser.ask("[...document.querySelectorAll('[data-stage]')].map((one) => one.textContent)") == [
        "stage 0rank 0, 2→",
        "stage 1rank 1, 3",
    ]
    assert "improving" in browser.text("#course")
    assert "MFU" in browser.text("#course")
    assert "500 J (estimated), mean 250 W" in browser.text("#energy")
    assert "no intensity is known" in browser.text("#energy")
    assert f"hold: {ATTACK}" in browser.text("#energy")
    assert "0.9 of 1 kg (90 %): warn" in browser.text("#energy")
    assert "9 of 10" in browser.text("#federated")
    assert ATTACK in browser.text("#federated")
    assert "2.25" in browser.text("#federated-section")
    assert "saved" in browser.text("#checkpoints")
    assert "memory_leak" in browser.text("#anomalies")
    assert "accuracy" in browser.text("#custom")
    assert "node load 1.5" in browser.text("#nodes")
    assert "straggler" in browser.text("#incidents")
    assert "critical" in browser.text("#alerts")
    hidden = browser.ask("[...document.querySelectorAll('section')].filter((one) => one.hidden).map((one) => one.id)")
    assert hidden == []
    assert ATTACK in browser.text("h1"), "shown as text"
    assert browser.ask("document.body.dataset.attacked") is None
    assert browser.ask("document.images.length") == 0


def check_mouse_and_keyboard(browser: Chromium) -> None:
    browser.click("[data-rank='1']")
    browser.until("document.querySelector('#rank h3')?.textContent === 'Rank 1'")
    assert "GFLOP/s" in browser.text("#rank")
    browser.click("[data-by='memory']")
    browser.until("document.querySelector('[data-rank]').getAttribute('aria-label').includes('1.0 GiB')")
    browser.ask("document.querySelector(\"[data-rank='1']\").focus()")
    browser.press("ArrowRight")
    browser.until("document.activeElement.getAttribute('data-rank') === '2'")
    browser.press("Enter")
    browser.until("document.querySelector('#rank h3').textContent === 'Rank 2'")


def check_screens(browser: Chromium) -> None:
    """On a phone nothing is wider than the screen; both schemes can be read."""
    colours = {}
    for scheme in ("light", "dark"):
        browser.scheme(scheme)
        style = "getComputedStyle(document.body)"
        colours[scheme] = (browser.ask(f"{style}.backgroundColor"), browser.ask(f"{style}.color"))
    assert colours["light"] == ("rgb(251, 251, 250)", "rgb(28, 33, 38)")
    assert colours["dark"] == ("rgb(20, 23, 26)", "rgb(232, 234, 237)")
    browser.resize(390, 844)
    assert browser.ask("document.documentElement.scrollWidth") <= 390
    browser.resize(1280, 900)


def test_every_view_is_drawn_live_and_in_the_report_and_can_be_used(tmp_path: Path) -> None:
    job = FullJob()
    feed = PageFeed(job.state, interval_s=0.1)
    server = GuardedServer("127.0.0.1", 0, page_routes(feed, acknowledge=job.acknowledge))
    with Chromium(tmp_path) as browser:
        try:
            browser.open(server.url)
            browser.until("document.body?.dataset.drawn")
            check_every_view(browser)
            check_mouse_and_keyboard(browser)
            check_screens(browser)
            job.train(3)
            browser.until("document.querySelector('#loss [data-points]').dataset.points === '33'")
            browser.click("[data-alert='a-1']")
            browser.until("document.querySelector('#alerts').innerText.includes('acknowledged')")
            assert job.acknowledged == ["a-1"]
            job.view.take({"type": "membership", "action": "ended", "exit_code": 0})
            browser.until("document.querySelector('#summary').innerText.startsWith('finished')")
            assert all(one.startswith((server.url, "data:")) for one in browser.requested), browser.requested
            assert not browser.problems
        finally:
            feed.closing.set()
            server.close()
        path = write_report(tmp_path / "report.html", FullJob().state())
        browser.open(f"file://{path}")
        browser.until("document.body?.dataset.drawn && document.getElementById('state') !== null")
        check_every_view(browser)
        check_mouse_and_keyboard(browser)
        assert browser.ask("document.querySelector('[data-alert]')") is None, "a file acknowledges nothing"
        assert [one for one in browser.requested if not one.startswith("data:")] == [f"file://{path}"]
        assert not browser.problems
