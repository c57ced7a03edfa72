"""Fixtures shared by the whole suite: worlds of real ranks and a network lab.

What a test may need of the machine is checked by `tests/bed/needs.py`, what it must not leave by `tests/bed/leaks.py`.
"""

from __future__ import annotations

import gc
import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from tests.bed.interrupts import heed_interrupts
from tests.bed.warm_programs import Program
from tests.bed.world import World
from tests.comm.backends.mpi.world import MpiWorld
from tests.lab.network import Lab

# The suite runs a process per core: more threads in each only wait for one another.
torch.set_num_threads(1)

# Jobs of tests fork their workers: two cores import torch once for a job, not for each worker of it. What a test shows
# of the start itself, it shows with `--start-method spawn`.
os.environ.setdefault("PET_START_METHOD", "forkserver")
subprocess.Popen = Program  # type: ignore[misc]  # launchers are forked too; see there

heed_interrupts()

pytest_plugins = ["tests.bed.needs", "tests.bed.leaks", "tests.bed.gates"]

# The same examples in every run, however long one takes: what fails, fails for all, and a busy machine fails nothing.
settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("suite"), max_examples=25)
settings.load_profile("suite")
# Hypothesis draws from the constants of all modules that are imported at the moment. Examples would depend on which
# tests ran before in the same process, and to find the constants takes ten seconds in a fresh clone.
providers._get_local_constants = lambda: providers._local_constants


def pytest_configure(config: pytest.Config) -> None:
    """`make unit` tries fewer examples of each property."""
    if "not slow" in config.option.markexpr:
        settings.load_profile("quick")
    gc.disable()  # what is imported and collected stays: to look for garbage in it takes seconds


def pytest_collection_finish() -> None:
    """From here on garbage is collected, among what tests make."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _level_of_our_messages() -> Iterator[None]:
    """Commands set it for the whole process; the next test reads messages of every level."""
    logger = logging.getLogger("torsh_distributed")
    level, handlers = logger.level, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Real ranks: `world.run(function, *args, num_ranks=2, backend="gloo")`."""
    ranks = World()
    yield ranks
    ranks.close()


@pytest.fixture
def mpi_world(world: World, tmp_path: Path) -> MpiWorld:
    """Ranks of one MPI job: `mpi_world.run(function, *args, num_ranks=2)`."""
    return MpiWorld(world, tmp_path)


@pytest.fixture
def lab() -> Iterator[Lab]:
    """A network of namespaces: `lab.host(0).popen([...])`. Using it implies the marker `needs_netns`."""
    with Lab() as network:
        yield network
