"""Making a torsh group: find the nodes, share memory on each, connect them with gloo, or with MPI or TLS if asked."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from torsh_distributed.comm.backends.base import TorshProcessGroup
from torsh_distributed.comm.backends.hierarchical.inter_node import InterNodeGroup
from torsh_distributed.comm.backends.hierarchical.nodes import find_layout
from torsh_distributed.comm.backends.hierarchical.tls_group import TlsInterNodeGroup
from torsh_distributed.comm.backends.hierarchical.wire import BetweenNodes, HierarchicalWire
from torsh_distributed.comm.backends.shm.core import load_native
from torsh_distributed.comm.backends.shm.group import ShmOptions, create_shm_wire
from torsh_distributed.comm.backends.wire import Wire
from torsh_distributed.comm.meeting.network_interface import Leg, chosen_leg
from torsh_distributed.comm.trust.job_tls import find_tls


@dataclass(frozen=True, kw_only=True)
class TorshOptions:
    """What `init_process_group("torsh", pg_options=…)` and `new_group(pg_options=…)` take."""

    node: str | None = None
    """The name of this rank's node; ranks of one name share memory. None: the machine, as far as memory reaches."""

    shm: ShmOptions = field(default_factory=ShmOptions)
    """How memory is shared on a node."""

    between: Leg | None = None
    """What carries data between nodes: gloo over TCP, or MPI over the fabric that it was built for, which needs ranks
    that an MPI launcher started together. None: as TORSH_BETWEEN_NODES says, else gloo."""


def create_torsh_group(options: Any, backend_options: object) -> TorshProcessGroup:
    """c10d's hook for the backend; every rank of the group calls it. On one node it is shared memory alone.

    Any: the class of `options` is private to torch.
    """
    chosen = backend_options if isinstance(backend_options, TorshOptions) else TorshOptions()
    store, rank, timeout = options.store, options.group_rank, options.timeout
    leg = chosen_leg(chosen.between, os.environ)
    layout = find_layout(
        store,
        rank=rank,
        num_ranks=options.group_size,
        timeout_s=timeout.total_seconds(),
        node=chosen.node,
        between=leg,
    )
    local = layout.local_ranks
    wire: Wire = create_shm_wire(
        dist.PrefixStore(f"node/{layout.node_index}", store),
        rank=layout.position,
        num_ranks=len(local),
        timeout=timeout,
        options=chosen.shm,
    )
    if len(layout.nodes) > 1:
        tls = find_tls()
        world_ranks = list(range(options.group_size))
        if dist.is_initialized():
            world_ranks = list(options.global_ranks_in_group) or world_ranks
        world_size = dist.get_world_size() if dist.is_initialized() else options.group_size

        def between(name: str, members: Sequence[int], *, native: Any | None = None) -> BetweenNodes:
            its_store = dist.PrefixStore(name, store)
            if tls is not None:
                return TlsInterNodeGroup(its_store, members, rank, timeout, tls=tls)
            if leg == "mpi":
                from torsh_distributed.comm.backends.hierarchical.mpi_inter_node import MpiInterNodeGroup

                return MpiInterNodeGroup(
                    its_store,
                    members,
                    rank,
                    timeout,
                    world_ranks=[world_ranks[member] for member in members],
                    world_size=world_size,
                    name=f"{options.group_id}/{name}",
                )
            return InterNodeGroup(its_store, members, rank, timeout, native)

        # First: every rank takes part, and MPI starts when all do.
        all_ranks = between("all", range(options.group_size))
        shard_group = None
        if layout.position < layout.num_shards:
            members = [ranks[layout.position] for ranks in layout.nodes]
            native = load_native() if chosen.shm.core != "portable" else None
            shard_group = between(f"shard/{layout.position}", members, native=native)
        wire = HierarchicalWire(layout, wire, shard_group, all_ranks)
    group = TorshProcessGroup(store, wire, timeout)
    group.title = "torsh"  # on one node the wire is shm's
    return group
