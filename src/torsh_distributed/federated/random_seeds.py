"""Seeds that follow from what they are for, so a retried or resumed round draws the numbers it would have drawn."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derived_seed(*parts: int | str) -> int:
    """A number below 2**63 from a seed and the names of what it is for."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 1


def seed_everything(seed: int) -> None:
    """Seed the generators that a training loop may use: torch's, numpy's and Python's."""
    # Not torch.manual_seed: where a GPU is not in use it keeps a formatted stack for later, which takes a millisecond.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed % 2**32)  # the one that users' code draws from
    random.seed(seed)


@contextmanager
def drawing_as_of(seed: int) -> Iterator[None]:
    """While open, what is drawn on the CPU follows from the seed; then random numbers go on as if nothing was drawn."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    seed_everything(seed)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
