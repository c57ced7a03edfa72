"""Suggestions of ranks in the run's own seconds and bytes, and only where its memory calls for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.observe.bottlenecks.test_device_use import add_events, memory
from tests.observe.trace.recorded import EventWriter, write_run
from torsh_distributed.cli.trace.trace_commands import recommendation_lines
from torsh_distributed.observe.bottlenecks.bottleneck import analyse
from torsh_distributed.observe.bottlenecks.recommendation import Recommendation, plan_variables, recommend


def suggestion(title: str, **facts: Any) -> dict[str, Any]:
    return {"type": "suggestion", "title": title, "evidence": "seen", **facts}


def advice(folder: Path) -> dict[str, Recommendation]:
    return {one.title: one for one in recommend(analyse(folder))}


def test_a_share_is_of_the_part_that_it_names(tmp_path: Path) -> None:
    write_run(tmp_path, data_s=0.02)  # 80 ms: 20 loading, 50 computing, 10 transferring
    change = '[precision]\ndtype = "bf16"'
    add_events(tmp_path, suggestion("bf16", gain=0.5, part="busy", is_bound=True, plan_change=change))
    found = advice(tmp_path)["bf16"]
    assert found.gain_s == pytest.approx(0.025, rel=0.01)
    assert found.reckoning == "seen; 50% of the 50.0 ms that a step spends without waiting"
    assert found.overrides == {"TORSH_PLAN__PRECISION__DTYPE": "bf16"}
    assert "up to 25.00 ms a step" in recommendation_lines([found], 0.08)[0]


def test_half_of_a_bubble_is_what_was_measured_of_it(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path, 0)
    for step in range(12):
        begin_s = 1000.0 + 0.1 * step
        writer.add("phase", begin_s, 0.06, phase="stage", thread=1)
        writer.add("phase", begin_s, 0.1, phase="schedule", thread=1)
        writer.add("step", begin_s, 0.1, timed=False, step=step + 1)
    writer.write()
    add_events(tmp_path, suggestion("more microbatches", gain=0.5, part="bubble", is_bound=True))
    assert advice(tmp_path)["more microbatches"].gain_s == pytest.approx(0.02, rel=0.01)


def test_no_bubble_is_nothing_to_gain(tmp_path: Path) -> None:
    write_run(tmp_path)
    add_events(tmp_path, suggestion("more microbatches", gain=0.5, part="bubble", is_bound=True))
    assert advice(tmp_path) == {}


@pytest.mark.parametrize(("peak", "is_told"), [(95, True), (60, False)])
def test_what_saves_memory_is_advice_where_it_was_short(tmp_path: Path, peak: int, is_told: bool) -> None:
    write_run(tmp_path)
    add_events(tmp_path, memory(peak), suggestion("shard", gain_bytes=3 << 30, plan_change="[mesh]\ndp = 1\nshard = 8"))
    found = advice(tmp_path)
    assert ("shard" in found) == is_told
    if is_told:
        (line, *_) = recommendation_lines([found["shard"]], 0.06)
        assert line == "1. shard: 3.00 GiB less of a rank's peak (confidence 1.00)"


@pytest.mark.parametrize(("peak", "is_told"), [(40, True), (60, False)])
def test_what_takes_memory_is_advice_where_it_was_free(tmp_path: Path, peak: int, is_told: bool) -> None:
    write_run(tmp_path, num_passes=20)  # 20 forward passes of 0.1 ms
    kept = suggestion("keep", gain=1.0, part="forward", is_bound=True, takes_memory=True)
    add_events(tmp_path, memory(peak), kept)
    found = advice(tmp_path)
    assert ("keep" in found) == is_told
    if is_told:
        assert found["keep"].gain_s == pytest.approx(0.002, rel=0.01)


def test_a_change_of_several_keys_is_tried_with_all_of_them() -> None:
    assert plan_variables('[pipeline]\nschedule = "gpipe"\nstages_per_rank = 2\n[compile]\nenabled = true') == {
        "TORSH_PLAN__PIPELINE__SCHEDULE": "gpipe",
        "TORSH_PLAN__PIPELINE__STAGES_PER_RANK": "2",
        "TORSH_PLAN__COMPILE__ENABLED": "true",
    }
