from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def watching(
    folder: Path, config: GreenConfig, *, events: list[dict[str, Any]], stops: list[bool], paces: list[float]
) -> Iterator[EnergyWatch]:
    spec = JobSpec(entry=Entry(target="train.py"), nproc_per_node=2, green=config)
    with Loop() as loop, Terminal() as terminal:
        watch = EnergyWatch(
            config,
            spec,
            loop,
            LauncherOutput(terminal, is_json=True),
            take=events.append,
            pace=paces.append,
            stop=lambda: stops.append(True),
            want=lambda workers, reason, longest_s: None,
            guardian=cast("Guardian", None),  # nothing is set that it would put back
            directory=folder,
        )
        try:
            yield watch
        finally:
            watch.close()


def test_an_epoch_begins_once_though_ranks_tell_it_at_different_moments(tmp_path: Path) -> None:
    config = GreenConfig(enabled=True, interval_s=60.0, max_epoch_kwh=1.0, on_budget="stop")
    events: list[dict[str, Any]] = []
    stops: list[bool] = []
    with watching(tmp_path, config, events=events, stops=stops, paces=[]) as watch:
        watch.heed(0, told(0, 1))
        watch.heed(-1, interval(0.7 * 3.6e6))
        watch.heed(1, told(1, 0))  # it was sent before its rank got there
        watch.heed(0, told(0, 1))
        watch.heed(-1, interval(0.4 * 3.6e6))
        assert stops == [True]
    # The reading at the end says the epoch in which it was taken.
    assert {one["epoch"] for one in events if one["type"] == "energy"} == {1}


def test_workers_are_slowed_as_long_as_the_budget_is_spent_that_asks_for_it(tmp_path: Path) -> None:
    """A new epoch has its whole budget: they had paused to the end of the run."""
    config = GreenConfig(enabled=True, interval_s=60.0, max_epoch_kwh=1.0, max_kwh=2.0, on_budget="slow")
    paces: list[float] = []
    with watching(tmp_path, config, events=[], stops=[], paces=paces) as watch:
        for epoch in (0, 1):
            watch.heed(0, told(0, epoch))
            watch.heed(-1, interval(0.6 * 3.6e6))
            assert paces == [1.0, 0.0] * epoch
            watch.heed(-1, interval(0.6 * 3.6e6))
            assert paces == [*([1.0, 0.0] * epoch), 1.0]
        watch.heed(0, told(0, 2))
        assert paces == [1.0, 0.0, 1.0], "that of the whole run is spent"


def test_a_cap_does_not_end_the_pauses_of_a_spent_budget(tmp_path: Path) -> None:
    """Under a cap that was not reached the next reading had taken them back."""
    config = GreenConfig(enabled=True, interval_s=60.0, max_kwh=1.0, on_budget="slow")
    paces: list[float] = []
    with watching(tmp_path, config, events=[], stops=[], paces=paces) as watch:
        watch.heed(-1, interval(2 * 3.6e6))
        assert paces == [1.0]
        watch.pause("cap", 0.3)
        watch.pause("cap", 3.0)
        watch.pause("cap", 0.0)
        assert paces == [1.0, 3.0, 1.0]
