"""Clusters for the tests of engines: state in a directory of each test, one SLURM for all of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bed.leaks import KEPT
from tests.bed.needs import command
from tests.lab.slurm_cluster import PROGRAMS, SlurmCluster


@pytest.fixture
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where jobs are remembered, for this test alone."""
    folder = tmp_path / "state"
    monkeypatch.setenv("TORSH_STATE_DIR", str(folder))
    return folder


@pytest.fixture(scope="session")
def _slurm_daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    missing = [reason for program in PROGRAMS if (reason := command(program)) is not None]
    if missing:
        pytest.skip("; ".join(missing))
    if os.geteuid() != 0:
        pytest.skip("slurmd runs jobs as root alone")
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as cluster:
        KEPT.update(cluster.pids)
        yield cluster


@pytest.fixture
def slurm(_slurm_daemons: SlurmCluster, state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
    """A running SLURM of one node with eight slots, to which this process's client programs speak."""
    for name, value in _slurm_daemons.env.items():
        monkeypatch.setenv(name, value)
    return _slurm_daemons
