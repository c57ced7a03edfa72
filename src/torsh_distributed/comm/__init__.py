"""Moving bytes between ranks: stores, backends, groups, collectives."""

from torsh_distributed.comm.abort import abort
from torsh_distributed.comm.algorithms.base import Algorithm
from torsh_distributed.comm.algorithms.hierarchical import Hierarchical
from torsh_distributed.comm.algorithms.packed import bucketed_all_reduce, fused_all_reduce
from torsh_distributed.comm.algorithms.pipelined import Pipelined
from torsh_distributed.comm.algorithms.spread import multi_root_broadcast, scatter_reduce, tree_broadcast
from torsh_distributed.comm.backend import BackendCapabilities, BackendType, is_available, probe_capabilities
from torsh_distributed.comm.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from torsh_distributed.comm.groups import CommunicationGroup, GroupManager, GroupType
from torsh_distributed.comm.objects import (
    all_gather_object,
    all_gather_varsize,
    broadcast_object,
    gather_object,
    recv_object,
    scatter_object,
    send_object,
)
from torsh_distributed.comm.p2p import irecv, isend, recv, send
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
    regroup,
    roster,
    validate_rank,
)
from torsh_distributed.comm.reduce_op import ReduceOp
from torsh_distributed.comm.rendezvous import Roster
from torsh_distributed.comm.scheduler import CommunicationScheduler, Priority, SchedulingStrategy
from torsh_distributed.comm.stats import CommunicationStats, OperationStats
from torsh_distributed.comm.store import Store, open_store
from torsh_distributed.comm.trace import FlightRecorder, Record, recorder
from torsh_distributed.comm.work import Work

__all__ = [
    "Algorithm",
    "BackendCapabilities",
    "BackendType",
    "CommunicationGroup",
    "CommunicationScheduler",
    "CommunicationStats",
    "FlightRecorder",
    "GroupManager",
    "GroupType",
    "Hierarchical",
    "OperationStats",
    "Pipelined",
    "Priority",
    "Record",
    "ReduceOp",
    "Roster",
    "SchedulingStrategy",
    "Store",
    "Work",
    "abort",
    "all_gather",
    "all_gather_object",
    "all_gather_varsize",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object",
    "bucketed_all_reduce",
    "destroy_process_group",
    "device",
    "fused_all_reduce",
    "gather",
    "gather_object",
    "get_backend",
    "get_rank",
    "get_world_size",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "local_rank",
    "local_world_size",
    "multi_root_broadcast",
    "node_rank",
    "open_store",
    "probe_capabilities",
    "recorder",
    "recv",
    "recv_object",
    "reduce",
    "reduce_scatter",
    "regroup",
    "roster",
    "scatter",
    "scatter_object",
    "scatter_reduce",
    "send",
    "send_object",
    "tree_broadcast",
    "validate_rank",
]
