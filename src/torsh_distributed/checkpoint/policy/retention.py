"""Which checkpoints to remove: pure, so that it can be tested without a disk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class StepLoss(NamedTuple):
    """A complete checkpoint: its step and loss."""

    step: int
    loss: float | None


def steps_to_remove(
    found: Sequence[StepLoss],
    *,
    keep: int,
    keep_best: int = 0,
    keep_every: int | None = None,
    saved: int | None = None,
) -> list[int]:
    """Steps of `found` to remove, oldest first: all but the last `keep`, the `keep_best` of lowest loss, and multiples
    of `keep_every`.

    The newest always stays, and so does the one that was just `saved`: if training went back because the newest ones
    are damaged, it is older than those, and may be the only good one.
    """
    newest = sorted(found, key=lambda one: one.step, reverse=True)
    kept = {one.step for one in newest[: max(1, keep)]} | (set() if saved is None else {saved})
    measured = [one for one in newest if one.loss is not None and math.isfinite(one.loss)]
    kept |= {one.step for one in sorted(measured, key=lambda one: one.loss or 0.0)[:keep_best]}
    if keep_every is not None:
        kept |= {one.step for one in newest if one.step % keep_every == 0}
    return sorted(one.step for one in newest if one.step not in kept)
