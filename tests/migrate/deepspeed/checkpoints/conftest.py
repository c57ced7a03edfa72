"""Checkpoints of the real DeepSpeed, made once for the tests of this folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.migrate.deepspeed.checkpoints.making import FURTHER, QUICK, Made, make_all
from tests.migrate.deepspeed.conftest import DeepSpeedWorld


@dataclass
class RealCheckpoints:
    """Where they are, and what DeepSpeed's tools read in each, by rank."""

    directory: Path
    made: list[dict[str, Made]]


@pytest.fixture(scope="session")
def real(deepspeed_world: DeepSpeedWorld, tmp_path_factory: pytest.TempPathFactory) -> RealCheckpoints:
    """One format of every stage."""
    directory = tmp_path_factory.mktemp("deepspeed")
    made = deepspeed_world.run_theirs(make_all, str(directory), QUICK, timeout_s=200)
    return RealCheckpoints(directory, made)


@pytest.fixture(scope="session")
def further(deepspeed_world: DeepSpeedWorld, tmp_path_factory: pytest.TempPathFactory) -> RealCheckpoints:
    """The other formats of every stage."""
    directory = tmp_path_factory.mktemp("further")
    made = deepspeed_world.run_theirs(make_all, str(directory), FURTHER, timeout_s=200)
    return RealCheckpoints(directory, made)
