"""The fixture of the mpi tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bed.world import World
from tests.comm.backends.mpi.world import MpiWorld


@pytest.fixture
def mpi_world(world: World, tmp_path: Path) -> MpiWorld:
    """Ranks of one MPI job: `mpi_world.run(function, *args, num_ranks=2)`."""
    return MpiWorld(world, tmp_path)
