"""Moving bytes between ranks: stores, backends, groups, collectives."""

from torsh_distributed.comm.backend import BackendCapabilities, BackendType, is_available, probe_capabilities
from torsh_distributed.comm.process_group import (
    destroy_process_group,
    device,
    get_backend,
    get_rank,
    get_world_size,
    is_initialized,
    local_rank,
    local_world_size,
    node_rank,
    roster,
    validate_rank,
)
from torsh_distributed.comm.reduce_op import ReduceOp
from torsh_distributed.comm.rendezvous import Roster

__all__ = [
    "BackendCapabilities",
    "BackendType",
    "ReduceOp",
    "Roster",
    "destroy_process_group",
    "device",
    "get_backend",
    "get_rank",
    "get_world_size",
    "is_available",
    "is_initialized",
    "local_rank",
    "local_world_size",
    "node_rank",
    "probe_capabilities",
    "roster",
    "validate_rank",
]
