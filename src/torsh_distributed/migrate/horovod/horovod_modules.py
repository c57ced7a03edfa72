"""What scripts and libraries import from Horovod: the modules, and the names in each."""

from __future__ import annotations

import socket
from collections.abc import Mapping, MutableMapping
from types import ModuleType
from typing import Any

from torsh_distributed.migrate import horovod as surface
from torsh_distributed.migrate.horovod import basics, elastic, mpi_ops, process_sets, state_broadcast
from torsh_distributed.migrate.horovod.collectives import (
    horovod_compression,
    object_encoding,
)
from torsh_distributed.migrate.horovod.elastic import elastic_run, elastic_sampler, elastic_state, state_handlers
from torsh_distributed.migrate.horovod.horovod_errors import HorovodInternalError, HostsUpdatedInterrupt
from torsh_distributed.migrate.horovod.launching.function_run import run
from torsh_distributed.migrate.horovod.mpi_ops import HorovodBasics
from torsh_distributed.migrate.horovod.training import horovod_optimizer, sync_batch_norm

VERSION = "0.28.1"
"""The Horovod whose surface this is."""
_TORCH_ONLY = ("run", "mpi_ops", "elastic")


_VARIABLES = {
    "HOROVOD_RANK": "RANK",
    "HOROVOD_SIZE": "WORLD_SIZE",
    "HOROVOD_LOCAL_RANK": "LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE": "LOCAL_WORLD_SIZE",
    "HOROVOD_CROSS_RANK": "GROUP_RANK",
    "HOROVOD_CROSS_SIZE": "GROUP_WORLD_SIZE",
}
"""What horovodrun tells a worker, and torchrun's names for it."""


def set_variables(environ: MutableMapping[str, str]) -> None:
    """Scripts read their rank from HOROVOD_RANK and its like before `init`, too."""
    for theirs, ours in _VARIABLES.items():
        if ours in environ:
            environ.setdefault(theirs, environ[ours])
    if "RANK" in environ:
        environ.setdefault("HOROVOD_HOSTNAME", socket.gethostname())


def namespaces() -> Mapping[str, Mapping[str, Any]]:
    """Every module by its name in Horovod, parents first."""
    errors = {"HorovodInternalError": HorovodInternalError, "HostsUpdatedInterrupt": HostsUpdatedInterrupt}
    torch_names = {name: getattr(surface, name) for name in _all(surface) if name not in _TORCH_ONLY}
    return {
        "horovod": {"__version__": VERSION, "run": run},
        "horovod.common": {},
        "horovod.common.exceptions": errors,
        "horovod.common.basics": {"HorovodBasics": HorovodBasics},
        "horovod.common.util": _extension_checks(),
        "horovod.common.process_sets": {
            **_public(process_sets, "ProcessSet", "global_process_set", "add_process_set", "remove_process_set")
        },
        "horovod.common.elastic": {
            **_public(elastic_state, "State", "ObjectState"),
            "run_fn": elastic_run.run_fn,
        },
        "horovod.runner": {"run": run},
        "horovod.torch": {**torch_names, "__version__": VERSION, "is_homogeneous": basics.is_homogeneous},
        "horovod.torch.mpi_ops": {
            **_public(mpi_ops, *mpi_ops.__all__),
            "_basics": mpi_ops._basics,
        },
        "horovod.torch.compression": _public(
            horovod_compression, "Compression", "Compressor", "NoneCompressor", "FP16Compressor"
        ),
        "horovod.torch.functions": {
            **_public(state_broadcast, "broadcast_parameters", "broadcast_optimizer_state"),
            **_public(object_encoding, "broadcast_object", "allgather_object"),
        },
        "horovod.torch.optimizer": _public(horovod_optimizer, "DistributedOptimizer"),
        "horovod.torch.sync_batch_norm": _public(sync_batch_norm, "SyncBatchNorm"),
        "horovod.torch.elastic": {name: getattr(elastic, name) for name in _all(elastic)},
        "horovod.torch.elastic.state": {
            **_public(elastic_state, "TorchState"),
            **_public(
                state_handlers,
                "StateHandler",
                "ModelStateHandler",
                "OptimizerStateHandler",
                "SamplerStateHandler",
                "get_handler_registry",
                "set_handler_registry",
            ),
        },
        "horovod.torch.elastic.sampler": _public(elastic_sampler, "ElasticSampler"),
    }


def _all(package: Any) -> list[str]:
    """The names of a package. Any: type checkers read its stub, which has no list."""
    names: list[str] = package.__all__
    return names


def _public(module: ModuleType, *names: str) -> dict[str, Any]:
    return {name: getattr(module, name) for name in names}


def _extension_checks() -> dict[str, Any]:
    """The questions of `horovod.common.util`: whether Horovod is there for a framework."""

    def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
        """Whether Horovod works with a framework: with torch, here."""
        return ext_base_name == "torch"

    def check_extension(ext_name: str, ext_env_var: str = "", pkg_path: str = "", *args: Any) -> None:
        """Raise ImportError if Horovod does not work with a framework."""
        if not ext_name.startswith("horovod.torch"):
            raise ImportError(f"{ext_name} is not part of torsh_distributed's horovod, which is for torch")

    return {
        "extension_available": extension_available,
        "check_extension": check_extension,
        "gloo_built": lambda verbose=False: basics.gloo_built(),
        "mpi_built": lambda verbose=False: basics.mpi_built(),
        "nccl_built": lambda verbose=False: basics.nccl_built(),
        "is_homogeneous": basics.is_homogeneous,
    }
