"""Fixtures shared by the whole suite: worlds of real ranks, and what a test may need of the machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.bed.world import World


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Real ranks: `world.run(function, *args, num_ranks=2, backend="gloo")`."""
    ranks = World()
    yield ranks
    ranks.close()
