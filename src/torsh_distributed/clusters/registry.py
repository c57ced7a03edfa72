"""Engines by name. A name's module is imported when the engine is opened, and its package only by the engine itself."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torsh_distributed.clusters.base import ClusterEngine
from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineEntry:
    """Where an engine is found and what it needs."""

    home: str
    """The module and the class, as `module:Class`. It is called with the engine's options, texts by name."""

    summary: str
    """One line for the list of engines."""

    package: str | None = None
    """The Python package without which it cannot run."""

    extra: str | None = None
    """The extra of this library that installs the package."""


ENGINES: dict[str, EngineEntry] = {
    "k8s": EngineEntry(
        home="torsh_distributed.clusters.kubernetes.kubernetes_engine:KubernetesEngine",
        summary="pods of Kubernetes: an Indexed Job, a JobSet, a TrainJob or a PyTorchJob",
    ),
    "ssh": EngineEntry(
        home="torsh_distributed.clusters.ssh.ssh_engine:SshEngine",
        summary="a list of hosts, one launcher on each through the system's ssh",
    ),
    "slurm": EngineEntry(
        home="torsh_distributed.clusters.slurm.slurm_engine:SlurmEngine",
        summary="a batch job, its ranks started by srun",
    ),
    "mpi": EngineEntry(
        home="torsh_distributed.clusters.mpi_engine:MpiEngine",
        summary="ranks started by mpiexec of MPICH or Open MPI",
    ),
    "ray": EngineEntry(
        home="torsh_distributed.clusters.ray.ray_engine:RayEngine",
        summary="actors of a Ray cluster, through its job server",
        package="ray",
        extra="ray",
    ),
    "dask": EngineEntry(
        home="torsh_distributed.clusters.dask.dask_engine:DaskEngine",
        summary="workers of a Dask cluster",
        package="distributed",
        extra="dask",
    ),
}
"""Adding an engine is one line here and a module with its class."""


def engine_entry(name: str) -> EngineEntry:
    """What is known about the engine of that name; raises InvalidArgument for an unknown one."""
    if name not in ENGINES:
        near = difflib.get_close_matches(name, ENGINES, n=1)
        raise InvalidArgument(
            f"there is no engine named {name!r}",
            hint=f"did you mean {near[0]!r}?" if near else f"engines: {', '.join(sorted(ENGINES))}",
            engine=name,
        )
    return ENGINES[name]


def open_engine(name: str, options: Mapping[str, str] | None = None) -> ClusterEngine:
    """The engine of that name, with its settings (`--set key=value`).

    Raises FeatureNotAvailable with the `pip install` line if its package is missing; an option that it does not have
    is an InvalidArgument of the engine itself. Nothing is connected yet.
    """
    entry = engine_entry(name)
    if entry.package is not None and importlib.util.find_spec(entry.package) is None:
        raise FeatureNotAvailable(
            f"the engine {name!r} needs the package {entry.package!r}, which is not installed",
            hint=f'pip install "torsh-distributed[{entry.extra}]"',
            engine=name,
        )
    module, _, kind = entry.home.partition(":")
    make: Callable[[Mapping[str, str]], ClusterEngine] = getattr(importlib.import_module(module), kind)
    return make(dict(options or {}))
