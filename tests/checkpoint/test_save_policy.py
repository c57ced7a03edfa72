"""What is kept: the last ones, the best, every m-th; never nothing."""

from __future__ import annotations

import math
from pathlib import Path

import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.bed.world import World
from torsh_distributed.checkpoint import save_policy
from torsh_distributed.checkpoint.files.checkpoint_directory import REQUEST, StepLoss, steps_to_remove
from torsh_distributed.checkpoint.save_policy import SaveTriggers

FOUND = st.lists(
    st.tuples(st.integers(0, 50), st.none() | st.floats(allow_nan=True)).map(lambda pair: StepLoss(*pair)),
    unique_by=lambda one: one.step,
)


@given(FOUND, st.integers(1, 5), st.integers(0, 3), st.none() | st.integers(1, 10))
def test_what_stays_is_what_was_asked_for(found: list[StepLoss], keep: int, best: int, every: int | None) -> None:
    gone = steps_to_remove(found, keep=keep, keep_best=best, keep_every=every)
    steps = sorted((one.step for one in found), reverse=True)
    stay = [step for step in steps if step not in gone]
    assert set(gone) <= set(steps)
    assert stay[: min(keep, len(steps))] == steps[:keep]
    losses = sorted(one.loss for one in found if one.loss is not None and math.isfinite(one.loss))
    kept = [one.loss for one in found if one.step in stay and one.loss is not None and math.isfinite(one.loss)]
    assert all(loss in kept for loss in losses[:best])
    assert every is None or all(step in stay for step in steps if step % every == 0)


def test_the_lowest_loss_stays() -> None:
    found = [StepLoss(step, loss) for step, loss in ((1, 0.5), (2, 0.1), (3, 0.4), (4, math.nan), (5, None))]
    assert steps_to_remove(found, keep=1, keep_best=1) == [1, 3, 4]


def test_what_was_just_saved_stays_though_damaged_ones_are_newer() -> None:
    """Training went back to step 4, because 9 and 10 are damaged."""
    found = [StepLoss(step, None) for step in (4, 5, 9, 10)]
    assert steps_to_remove(found, keep=1, saved=5) == [4, 9]


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
    assert save_policy._CHECK_S == 1.0, "far more steps than happen between two exchanges"
    first, second = world.run(decisions, str(tmp_path), 200, num_ranks=2)
    assert first == second
    assert len(first) == 1
