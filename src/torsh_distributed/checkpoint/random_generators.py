"""The random generators of this rank, so dropout and the like resume where they stopped."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torsh_distributed.comm.collectives.objects import all_gather_object
from torsh_distributed.comm.groups import process_group


def random_state() -> dict[str, Any]:
    """States of torch's generators on the host and on every GPU in use, of Python's, and of numpy's if it is loaded."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],  # type: ignore[no-untyped-call]
        # As tensors: they are copied at every save, and a list of 600 numbers is checked number by number.
        "python": [version, torch.tensor(internal), gauss],
        "numpy": None,
    }
    if "numpy.random" in sys.modules:
        name, keys, *rest = sys.modules["numpy.random"].get_state()
        state["numpy"] = [name, torch.from_numpy(keys.astype("int64")), *rest]
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Continue with `random_state()` of the same rank."""
    torch.set_rng_state(state["cpu"])
    if state["cuda"] and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(_numbers(internal)), gauss))
    if state["numpy"] is not None and "numpy.random" in sys.modules:
        name, keys, *rest = state["numpy"]
        sys.modules["numpy.random"].set_state((name, _numbers(keys), *rest))


def _numbers(kept: Sequence[int] | torch.Tensor) -> Sequence[int]:
    """As the generators take them; earlier checkpoints have lists."""
    numbers: Sequence[int] = kept.tolist() if isinstance(kept, torch.Tensor) else kept
    return numbers


def reseed(seed: int) -> None:
    """Seed all of them."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(seed % 2**32)


def gather_random_states() -> list[dict[str, Any]]:
    """The states of torch's, Python's and numpy's generators, by rank; every rank calls this and gets all of them."""
    return all_gather_object(random_state())


def restore_random_states(states: Sequence[dict[str, Any]], *, seed: int) -> None:
    """Restore this rank's generators; in a world of another size, seed them with `seed`."""
    if len(states) != process_group.world_size():
        reseed(seed)
        return
    restore_random_state(states[process_group.rank()])
