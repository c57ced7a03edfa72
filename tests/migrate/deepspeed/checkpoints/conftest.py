"""Checkpoints of the real DeepSpeed, made once for the tests of this folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.bed.world import World
from tests.migrate.deepspeed.checkpoints.making import FURTHER, QUICK, Made, make_all


@dataclass
class RealCheckpoints:
    """Where they are, and what DeepSpeed's tools read in each, by rank."""

    directory: Path
    made: list[dict[str, Made]]


@pytest.fixture(scope="session")
def real(world: World, tmp_path_factory: pytest.TempPathFactory) -> RealCheckpoints:
    """One format of every stage."""
    directory = tmp_path_factory.mktemp("deepspeed")
    made = world.run(make_all, str(directory), QUICK, num_ranks=2, backend=None, timeout_s=200)
    return RealCheckpoints(directory, made)


@pytest.fixture(scope="session")
def further(world: World, tmp_path_factory: pytest.TempPathFactory) -> RealCheckpoints:
    """The other formats of every stage."""
    directory = tmp_path_factory.mktemp("further")
    made = world.run(make_all, str(directory), FURTHER, num_ranks=2, backend=None, timeout_s=200)
    return RealCheckpoints(directory, made)
