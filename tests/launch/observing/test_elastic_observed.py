"""An elastic job under observation: a worker goes, another comes, and page and metrics follow."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.bed.ports import free_port
from tests.elastic.jobs import start_job
from tests.launch.observing.test_job_observer import get

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@pytest.mark.matrix
def test_workers_that_come_and_go_are_seen(tmp_path: Path) -> None:
    page, metrics = free_port(), free_port()
    (tmp_path / "slow").touch()
    options = ["--dashboard", "--dashboard-port", str(page), "--prometheus-port", str(metrics)]
    job = start_job(tmp_path, *options, num_workers=3, num_steps=400)

    def until(fits: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + 90
        state: dict[str, Any] = {}
        while True:
            try:
                state = json.loads(get(f"http://127.0.0.1:{page}/state.json"))
            except OSError:
                state = {}
            if state and fits(state):
                return state
            assert time.monotonic() < deadline, (state.get("job"), state.get("ranks"), state.get("incidents"))
            assert job.poll() is None, job.communicate()
            time.sleep(0.1)

    try:
        before = until(lambda state: [rank["rank"] for rank in state["ranks"] if rank["step"]] == [0, 1, 2])
        assert before["job"]["world_size"] == 3
        victim = before["ranks"][1]["pid"]
        os.kill(victim, signal.SIGKILL)

        def is_whole_again(state: dict[str, Any]) -> bool:
            told = [one for one in state["incidents"] if one["type"] == "membership" and one["action"] == "recovered"]
            pids = {rank["pid"] for rank in state["ranks"]}
            return len(told) == 2 and len(pids) == 3 and victim not in pids

        after = until(is_whole_again)
        text = get(f"http://127.0.0.1:{metrics}/metrics")
    finally:
        (tmp_path / "slow").unlink(missing_ok=True)
        output, _ = job.communicate(timeout=90)
    assert job.returncode == 0, output
    actions = [one["action"] for one in after["incidents"] if one["type"] == "membership" and one["rank"] == -1]
    assert [one for one in actions if one != "health"] == ["started", "lost", "recovered", "recovered"]
    assert after["job"]["attempt"] == 0, "an epoch is no restart"
    assert after["job"]["world_size"] == 3
    assert not any(rank["is_silent"] for rank in after["ranks"])
    for line in ("torsh_world_size 3.0", "torsh_ranks 3.0", "torsh_regroupings_total 2.0", "torsh_failures_total 1.0"):
        assert line in text, text
