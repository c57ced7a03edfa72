"""What is kept: the last ones, the best, every m-th; never nothing."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from torsh_distributed.checkpoint.policy.retention import StepLoss, steps_to_remove

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
