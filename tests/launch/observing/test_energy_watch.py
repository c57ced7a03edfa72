from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from torsh_distributed.launch.local.failure_report import LauncherOutput
from torsh_distributed.launch.local.guardian import Guardian
from torsh_distributed.launch.local.loop import Loop
from torsh_distributed.launch.local.terminal import Terminal
from torsh_distributed.launch.observing.energy_watch import EnergyWatch
from torsh_distributed.launch.spec import Entry, JobSpec
from torsh_distributed.plan import GreenConfig


def told(rank: int, epoch: int) -> dict[str, Any]:
    return {"type": "metrics", "rank": rank, "facts": {"epoch": epoch, "world_size": 2}}


def interval(joules: float) -> dict[str, Any]:
    return {
        "type": "energy",
        "rank": -1,
        "time": 1.0,
        "node": 0,
        "meter": "m",
        "source": "rapl",
        "is_measured": True,
        "joules": joules,
        "duration_s": 1.0,
    }


def test_an_epoch_begins_once_though_ranks_tell_it_at_different_moments(tmp_path: Path) -> None:
    config = GreenConfig(enabled=True, interval_s=60.0, max_epoch_kwh=1.0, on_budget="stop")
    spec = JobSpec(entry=Entry(target="train.py"), nproc_per_node=2, green=config)
    events: list[dict[str, Any]] = []
    stops: list[bool] = []
    with Loop() as loop, Terminal() as terminal:
        watch = EnergyWatch(
            config,
            spec,
            loop,
            LauncherOutput(terminal, is_json=True),
            take=events.append,
            pace=lambda share: None,
            stop=lambda: stops.append(True),
            want=lambda workers, reason, longest_s: None,
            guardian=cast("Guardian", None),  # nothing is set that it would put back
            directory=tmp_path,
        )
        try:
            watch.heed(0, told(0, 1))
            watch.heed(-1, interval(0.7 * 3.6e6))
            watch.heed(1, told(1, 0))  # it was sent before its rank got there
            watch.heed(0, told(0, 1))
            watch.heed(-1, interval(0.4 * 3.6e6))
            assert stops == [True]
        finally:
            watch.close()
    # The reading at the end says the epoch in which it was taken.
    assert {one["epoch"] for one in events if one["type"] == "energy"} == {1}
