"""Distributed training for PyTorch: one `Plan` from a laptop to a cluster, on real backends."""

from importlib.metadata import version as _version

from torsh_distributed import errors, events
from torsh_distributed.comm import (
    BackendCapabilities,
    BackendType,
    ReduceOp,
    Roster,
    destroy_process_group,
    device,
    get_backend,
    get_rank,
    get_world_size,
    is_available,
    is_initialized,
    local_rank,
    local_world_size,
    node_rank,
    probe_capabilities,
    roster,
    validate_rank,
)
from torsh_distributed.comm.backends import register_backends as _register_backends
from torsh_distributed.errors import TorshError
from torsh_distributed.launch.environment import Environment, read_environment
from torsh_distributed.launch.init import distributed, init, init_process_group
from torsh_distributed.plan import Plan
from torsh_distributed.retry import CircuitBreaker, retry
from torsh_distributed.train import Engine, parallelize

__version__ = _version("torsh-distributed")

# The one thing that importing does: torch learns the names of our backends. Nothing is opened or started.
_register_backends()

__all__ = [
    "BackendCapabilities",
    "BackendType",
    "CircuitBreaker",
    "Engine",
    "Environment",
    "Plan",
    "ReduceOp",
    "Roster",
    "TorshError",
    "__version__",
    "destroy_process_group",
    "device",
    "distributed",
    "errors",
    "events",
    "get_backend",
    "get_rank",
    "get_world_size",
    "init",
    "init_process_group",
    "is_available",
    "is_initialized",
    "local_rank",
    "local_world_size",
    "node_rank",
    "parallelize",
    "probe_capabilities",
    "read_environment",
    "retry",
    "roster",
    "validate_rank",
]
