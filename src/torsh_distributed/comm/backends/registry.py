"""Registers our backends with torch: now, or as soon as `torch.distributed` is imported.

Imports neither torch nor a backend, so a command that starts no group does not pay for them. The three functions of
torch that are wrapped here are the only ones that importing torsh_distributed changes. A plain torch script never calls
`init()`, and torch meets before it makes the group, so there is no later moment to do it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any

_C10D = "torch.distributed.distributed_c10d"
_CREATORS = {
    "shm": "torsh_distributed.comm.backends.shm.group:create_shm_group",
    "torsh": "torsh_distributed.comm.backends.hierarchical.group:create_torsh_group",
    "mpi4py": "torsh_distributed.comm.backends.mpi.group:create_mpi_group",
}
MPI_RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")


def announce_backends() -> None:
    """Make `init_process_group("shm")` work in a plain torch script. Called by importing torsh_distributed."""
    c10d = sys.modules.get(_C10D)
    if c10d is not None:
        _register(c10d)
    elif not any(isinstance(finder, _RegisterOnImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegisterOnImport())


class _RegisterOnImport:
    """Registers the backends once torch's module of process groups has been imported, by any code.

    A finder of `sys.meta_path` by its one method: importlib's base class takes 12 ms to import.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _C10D:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register(module)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]  # of this one loader object
        return spec


def _register(c10d: Any) -> None:
    """Any: torch's own module, which is not imported here."""
    for name, home in _CREATORS.items():
        if name.upper() not in c10d.Backend._plugins:
            devices = ["cpu"] if name == "mpi4py" else ["cpu", "cuda"]
            c10d.Backend.register_backend(name, _creator(home), extended_api=True, devices=devices)
    _open_monitored_barrier(c10d)
    _register_mpi_rendezvous(sys.modules["torch.distributed.rendezvous"])
    _register_job_store(sys.modules["torch.distributed.rendezvous"])


def _creator(home: str) -> Callable[..., object]:
    """The function at `module:name`, imported when the first group is made."""

    def create(*args: object) -> object:
        module, _, name = home.partition(":")
        made: object = getattr(importlib.import_module(module), name)(*args)
        return made

    return create


def _register_mpi_rendezvous(torch_rendezvous: Any) -> None:
    """Let `env://` find the place of a process that mpiexec started.

    torch's handler needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which mpiexec leaves out, and a backend cannot
    say where they come from. So the handler is wrapped: if RANK is missing and an MPI launcher started the process, MPI
    answers; in every other case torch's own handler does. This can go once torch lets a backend name its rendezvous.
    """
    handlers = torch_rendezvous._rendezvous_handlers
    torch_handler = handlers["env"]
    if getattr(torch_handler, "knows_mpi", False):
        return

    def find(url: str, timeout: Any = None, **options: Any) -> Iterator[Any]:
        if not _is_left_to_mpi(url):
            yield from torch_handler(url, **({"timeout": timeout} if timeout else {}), **options)
            return
        from torsh_distributed.comm.backends.mpi.rendezvous import meet_through_mpi

        yield meet_through_mpi(timeout) if timeout else meet_through_mpi()

    find.knows_mpi = True  # type: ignore[attr-defined]  # so registering twice wraps once
    handlers["env"] = find


def _open_monitored_barrier(c10d: Any) -> None:
    """Let `dist.monitored_barrier` take groups of this library; torch's function refuses all backends but gloo.

    It is wrapped, and left alone for every group of torch's. This can go once torch asks the group instead of its name.
    """
    torch_barrier = c10d.monitored_barrier
    if getattr(torch_barrier, "knows_our_groups", False):
        return

    @functools.wraps(torch_barrier)
    def monitored_barrier(
        group: Any = c10d.GroupMember.WORLD, timeout: Any = None, wait_all_ranks: bool = False
    ) -> None:
        chosen = c10d.GroupMember.WORLD if group is None else group
        if getattr(chosen, "fold_of", None) is None:
            torch_barrier(group, timeout, wait_all_ranks)
            return
        chosen.monitored_barrier(timedelta(seconds=timeout) if isinstance(timeout, float) else timeout, wait_all_ranks)

    monitored_barrier.knows_our_groups = True  # type: ignore[attr-defined]  # so registering twice wraps once
    c10d.monitored_barrier = monitored_barrier
    exported = sys.modules["torch.distributed"]
    if hasattr(exported, "monitored_barrier"):  # torch.distributed was imported before; else it takes ours from here
        exported.monitored_barrier = monitored_barrier  # type: ignore[attr-defined]  # a module takes any name


def _register_job_store(torch_rendezvous: Any) -> None:
    """Let torch's `env://` and `tcp://` open the store of `torsh run`, which asks for the job's secret.

    torch makes its TCPStore in one function; it is wrapped, and left alone for every address but the job's.
    """
    create = torch_rendezvous._create_c10d_store
    if getattr(create, "knows_job_store", False):
        return

    @functools.wraps(create)
    def create_or_find(hostname: str, port: int, rank: int, world_size: int, timeout: Any, *options: Any) -> object:
        from torsh_distributed.comm.meeting.rendezvous import job_store_url, open_job_store

        url = job_store_url(hostname, port)
        if url is not None:
            return open_job_store(url, timeout)
        return create(hostname, port, rank, world_size, timeout, *options)

    create_or_find.knows_job_store = True  # type: ignore[attr-defined]  # so registering twice wraps once
    torch_rendezvous._create_c10d_store = create_or_find


def _is_left_to_mpi(url: str) -> bool:
    """Whether the rank is not given and an MPI launcher started this process."""
    is_given = "RANK" in os.environ or "rank=" in url.partition("?")[2]
    return not is_given and any(name in os.environ for name in MPI_RANK_VARIABLES)
