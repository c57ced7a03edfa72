"""Pictures of schedules show every action and the bubble."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from torsh_distributed.parallel.pipeline import Timeline, compute_timeline, draw_schedule, schedule_text
from torsh_distributed.plan.sections.mesh import PipelineConfig


def shown(timeline: Timeline) -> list[str]:
    console = Console(width=130, file=io.StringIO(), record=True)
    console.print(schedule_text(timeline, width=60))
    return console.export_text().splitlines()


def test_the_text_has_a_row_for_each_rank_and_the_bubble() -> None:
    lines = shown(compute_timeline(PipelineConfig(num_microbatches=4), 2))
    assert [line[:6] for line in lines[:2]] == ["rank 0", "rank 1"]
    assert lines[1][8:12] == "····", "the second rank waits for the first"
    for number in range(4):
        assert lines[0].count(str(number)) - (number == 0) == 2, "forward and backward of each microbatch"
    assert "bubble 20.0%" in lines[2]
    assert shown(Timeline((), 2)) == ["nothing was scheduled"]


@pytest.mark.slow
def test_the_picture_is_a_png_with_a_box_for_each_action(tmp_path: Path) -> None:
    timeline = compute_timeline(PipelineConfig(schedule="zbv_zero_bubble", stages_per_rank=2, num_microbatches=4), 2)
    path = draw_schedule(timeline, tmp_path / "schedule.png", title="zbv")
    assert path.read_bytes().startswith(b"\x89PNG")
    bare = draw_schedule(Timeline((), 2), tmp_path / "empty.png")
    assert path.stat().st_size > 1.5 * bare.stat().st_size
