"""Moving bytes between ranks: stores, backends, groups, collectives."""

from torsh_distributed.comm.algorithms.base import Algorithm
from torsh_distributed.comm.algorithms.hierarchical import Hierarchical
from torsh_distributed.comm.algorithms.pipelined import Pipelined
from torsh_distributed.comm.backends.capabilities import (
    BackendCapabilities,
    BackendType,
    is_available,
    probe_capabilities,
)
from torsh_distributed.comm.collectives.objects import (
    all_gather_object,
    all_gather_varsize,
    broadcast_object,
    gather_object,
    recv_object,
    scatter_object,
    send_object,
)
from torsh_distributed.comm.collectives.packed import bucketed_all_reduce, fused_all_reduce
from torsh_distributed.comm.collectives.point_to_point import irecv, isend, recv, send
from torsh_distributed.comm.collectives.reduce_op import ReduceOp
from torsh_distributed.comm.collectives.spread import multi_root_broadcast, scatter_reduce, tree_broadcast
from torsh_distributed.comm.collectives.tensors import (
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
from torsh_distributed.comm.collectives.work import Work
from torsh_distributed.comm.groups.abort import abort
from torsh_distributed.comm.groups.manager import CommunicationGroup, GroupManager, GroupType
from torsh_distributed.comm.groups.process_group import (
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
from torsh_distributed.comm.measurement.communication_stats import CommunicationStats, OperationStats
from torsh_distributed.comm.measurement.flight_recorder import FlightRecorder, Record, recorder
from torsh_distributed.comm.meeting.rendezvous import Roster
from torsh_distributed.comm.scheduler import CommunicationScheduler, Priority, SchedulingStrategy
from torsh_distributed.comm.store import Store, open_store

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
