"""Ranks with the real DeepSpeed, to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.bed.world import World


class DeepSpeedWorld(World):
    """Ranks of a process of their own that has DeepSpeed imported: once, and out of sight of all other ranks."""

    def run_theirs(
        self, function: Callable[..., Any], *args: Any, num_ranks: int = 2, timeout_s: float = 60.0
    ) -> list[Any]:
        """The results by rank; DeepSpeed makes the group."""
        imports = ("tests.bed.deepspeed_loaded",)
        return self.run(function, *args, num_ranks=num_ranks, backend=None, timeout_s=timeout_s, imports=imports)


@pytest.fixture(scope="session")
def deepspeed_world() -> Iterator[DeepSpeedWorld]:
    """DeepSpeed itself: `deepspeed_world.run_theirs(function, …)`."""
    ranks = DeepSpeedWorld(is_light=True)
    yield ranks
    ranks.close()
