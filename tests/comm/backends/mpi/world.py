"""MPI worlds for tests: ranks of the test bed that are one MPICH job, through the launcher's own PMI server."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.bed.world import World
from tests.bed.zygote import Outcome
from torsh_distributed.comm.backends import announce_backends
from torsh_distributed.launch.mpi.pmi_server import PmiServer
from torsh_distributed.launch.mpi.pmi_worker import connect


def join_mpi_job(address: str) -> None:
    """Runs on every rank: let MPICH find the server. MPI itself is not touched."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ.update(connect(address, attempt=0, rank=rank, size=size))


def on_mpi(address: str, folder: Path, timeout_s: float, function: Callable[..., Any], *args: Any) -> Any:
    """Runs on every rank: `function(*args)` inside a world of the mpi4py backend."""
    join_mpi_job(address)
    announce_backends()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "mpi4py",
        store=dist.FileStore(str(folder / "store"), size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        return function(*args)
    finally:
        dist.destroy_process_group()


class MpiWorld:
    """Like `World`, with every rank a process of one MPI job."""

    def __init__(self, world: World, folder: Path) -> None:
        self._world = world
        self._folder = folder
        self._num_jobs = 0

    @contextmanager
    def job(self, num_ranks: int) -> Iterator[tuple[str, Path]]:
        """A PMI server and a fresh folder, for ranks that find their own way into a group."""
        self._num_jobs += 1
        folder = self._folder / f"job-{self._num_jobs}"
        folder.mkdir()
        with PmiServer(num_ranks) as server:
            yield server.address, folder

    def outcomes(
        self,
        function: Callable[..., Any],
        *args: Any,
        num_ranks: int = 2,
        group_timeout_s: float = 30.0,
        **options: Any,
    ) -> list[Outcome]:
        """How every rank ended."""
        with self.job(num_ranks) as (address, folder):
            call = (on_mpi, address, folder, group_timeout_s, function, *args)
            return self._world.outcomes(*call, num_ranks=num_ranks, backend=None, **{"timeout_s": 60.0, **options})

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        num_ranks: int = 2,
        group_timeout_s: float = 30.0,
        **options: Any,
    ) -> list[Any]:
        """The results by rank."""
        with self.job(num_ranks) as (address, folder):
            call = (on_mpi, address, folder, group_timeout_s, function, *args)
            return self._world.run(*call, num_ranks=num_ranks, backend=None, **{"timeout_s": 60.0, **options})
