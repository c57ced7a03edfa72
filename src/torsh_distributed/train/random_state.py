"""Saves and restores the random generators of every rank, so dropout and the like resume where they stopped."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from torsh_distributed.comm.collectives.objects import all_gather_object
from torsh_distributed.comm.groups import process_group


def gather_random_states() -> list[dict[str, Any]]:
    """The states of torch's and Python's generators, by rank; every rank calls this and gets all of them."""
    return all_gather_object(
        {
            "cpu": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
            "python": _plain(random.getstate()),
        }
    )


def restore_random_states(states: Sequence[dict[str, Any]], *, seed: int) -> None:
    """Restore this rank's generators; in a world of another size, reseed them, differently on each rank."""
    rank = process_group.rank()
    if len(states) != process_group.world_size():
        torch.manual_seed(seed + rank)
        random.seed(seed + rank)
        return
    torch.set_rng_state(states[rank]["cpu"])
    if states[rank]["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states[rank]["cuda"])
    version, internal, gauss = states[rank]["python"]
    random.setstate((version, tuple(internal), gauss))


def _plain(state: tuple[Any, ...]) -> list[Any]:
    version, internal, gauss = state
    return [version, list(internal), gauss]
