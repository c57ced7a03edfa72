"""The load test of the control plane: it measures, and it leaves no process behind when it fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks import light_workers
from benchmarks.light_workers import measure_load

pytestmark = pytest.mark.ranks


def running_light_workers() -> list[int]:
    """Processes of the load test that were started from here."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name != str(os.getpid()):
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:  # it has just ended
                continue
            if b"benchmarks.light_workers" in command:
                found.append(int(entry.name))
    return found


def test_a_death_is_known_on_every_node_and_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(light_workers, "_BUSY_S", 0.2)
    monkeypatch.setattr(light_workers, "_SETTLE_S", 0.0)
    before = running_light_workers()
    load = measure_load(num_nodes=3, nproc_per_node=3, num_kills=1, heartbeat_timeout_s=30)
    assert len(load.known_s) == 1
    assert load.num_workers == 9
    assert running_light_workers() == before


def test_a_launcher_that_fails_ends_the_test_at_once_and_nothing_is_left_behind() -> None:
    before = running_light_workers()
    with pytest.raises(RuntimeError, match="ended with exit code"):
        measure_load(num_nodes=2, nproc_per_node=0, num_kills=0)  # a job without workers is refused
    assert running_light_workers() == before
