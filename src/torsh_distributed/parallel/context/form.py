"""Which way attention takes over split sequences: keys around a ring, or heads in exchange for positions."""

from __future__ import annotations

from typing import Literal

from torsh_distributed.parallel.context.position_mask import PositionMask

Form = Literal["auto", "ring", "ulysses"]

RING_FROM_LENGTH = 1024
"""The shortest sequence at which a ring was measured to be quicker under a window (`python -m benchmarks context`)."""


def choose_form(
    form: Form, *, heads: int, size: int, length: int, mask: PositionMask, dropout_p: float = 0.0
) -> Literal["ring", "ulysses"]:
    """The form for an attention of `heads` heads on a rank to `length` positions, over `size` ranks; equal on all.

    Exchanging heads is quicker at every length, unless the mask hides far keys: a ring skips blocks that are hidden.
    """
    if form != "auto":
        return form
    if heads % size:
        return "ring"
    skips = length >= RING_FROM_LENGTH and mask.hides_far_keys(length)
    return "ring" if skips and dropout_p == 0 else "ulysses"
