"""When to save: decided alike on all ranks, whichever of them was told."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from tests.bed.world import World
from torsh_distributed.checkpoint.files.checkpoint_directory import REQUEST
from torsh_distributed.checkpoint.policy import save_triggers
from torsh_distributed.checkpoint.policy.save_triggers import SaveTriggers


def test_steps_seconds_and_requests(tmp_path: Path) -> None:
    triggers = SaveTriggers(tmp_path, every_steps=3)
    assert [step for step in range(1, 10) if triggers.after_step(step) is not None] == [3, 6, 9]
    always = SaveTriggers(tmp_path, every_steps=None, every_s=1e-9)
    decision = always.after_step(1)
    assert decision is not None
    assert decision.reason == "time"
    asked = SaveTriggers(tmp_path, every_steps=None)
    (tmp_path / REQUEST).touch()
    decision = asked.after_step(1)
    assert decision is not None
    assert decision.reason == "request"
    assert not (tmp_path / REQUEST).exists()


def test_the_best_metric_so_far() -> None:
    triggers = SaveTriggers(Path(), every_steps=None)
    assert [triggers.is_best(value) for value in (3.0, 2.0, 2.5, float("nan"), 1.0)] == [True, True, False, False, True]
    assert triggers.best == 1.0


def decisions(folder: str, num_steps: int) -> list[int]:
    """Only the last rank is told, at step 5."""
    triggers = SaveTriggers(Path(folder), every_steps=None)
    found = []
    for step in range(1, num_steps + 1):
        if step == 5 and dist.get_rank() == dist.get_world_size() - 1:
            triggers.ask()
        if triggers.after_step(step) is not None:
            found.append(step)
    return found


def test_what_one_rank_was_told_all_ranks_do_at_the_same_step(world: World, tmp_path: Path) -> None:
    assert save_triggers._CHECK_S == 1.0, "far more steps than happen between two exchanges"
    first, second = world.run(decisions, str(tmp_path), 200, num_ranks=2)
    assert first == second
    assert len(first) == 1
