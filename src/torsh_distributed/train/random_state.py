"""Saves and restores the random generators of every rank, so dropout and the like resume where they stopped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torsh_distributed.checkpoint.random_generators import random_state, reseed, restore_random_state
from torsh_distributed.comm.collectives.objects import all_gather_object
from torsh_distributed.comm.groups import process_group


def gather_random_states() -> list[dict[str, Any]]:
    """The states of torch's, Python's and numpy's generators, by rank; every rank calls this and gets all of them."""
    return all_gather_object(random_state())


def restore_random_states(states: Sequence[dict[str, Any]], *, seed: int) -> None:
    """Restore this rank's generators; in a world of another size, seed them with `seed`."""
    if len(states) != process_group.world_size():
        reseed(seed)
        return
    restore_random_state(states[process_group.rank()])
