"""The world's process group: bring it up, ask about it, take it down.

torch keeps the group itself; kept here is only what torch does not know: where the ranks live, and which
process made the group, so that a forked child cannot use its parent's sockets.
"""

from __future__ import annotations

import atexit
import logging
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from torsh_distributed import events
from torsh_distributed.comm.backend import choose_backend
from torsh_distributed.comm.rendezvous import Roster, join, open_store
from torsh_distributed.errors import (
    BackendNotInitialized,
    InvalidArgument,
    RankOutOfBounds,
    TorshError,
    translate_errors,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _World:
    pid: int
    roster: Roster
    attempt: int
    # Kept alive: rank 0 hosts the store in this object, and later groups meet through it.
    store: dist.Store


_world: _World | None = None


def start_world(
    backend: str,
    *,
    rank: int,
    world_size: int,
    master_addr: str,
    master_port: int,
    timeout_s: float,
    store: dist.Store | None = None,
    has_agent_store: bool = False,
    attempt: int = 0,
    node: str | None = None,
) -> None:
    """Meet the other ranks and bring up torch's default group; every rank calls this once.

    With `store` given, the ranks meet there; otherwise in a TCP store at the master's address, hosted by the launcher
    (`has_agent_store`) or by rank 0. Keys are prefixed with the attempt: a restarted world meets no stale ones.
    Nothing is left behind after a failure, so the call may be tried again.
    """
    global _world
    _refuse_second_start()
    chosen = choose_backend(backend)
    if store is None and world_size == 1 and not has_agent_store:
        store = dist.HashStore()  # nobody to meet: no port is opened, so jobs of one rank never collide
    if store is None:
        is_host = rank == 0 and not has_agent_store
        store = open_store(master_addr, master_port, is_host=is_host, timeout_s=timeout_s)
    prefixed = dist.PrefixStore(f"torsh/{attempt}", store)
    with translate_errors("rendezvous", rank=rank, world_size=world_size):
        roster = join(prefixed, rank=rank, world_size=world_size, timeout_s=timeout_s, node=node)
    with translate_errors("init_process_group", rank=rank, backend=chosen):
        dist.init_process_group(
            chosen,
            store=dist.PrefixStore("c10d", prefixed),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    _world = _World(os.getpid(), roster, attempt, store)
    events.set_rank(rank)
    if backend == "auto":
        reason = "a CUDA device is visible" if "nccl" in chosen else "no CUDA device is visible"
        events.emit(events.DecisionEvent(subject="backend", choice=chosen, reason=reason))
    events.emit(events.MembershipEvent(action="joined", world_size=world_size, attempt=attempt))
    atexit.register(destroy_process_group)


def _refuse_second_start() -> None:
    if _world is not None and _world.pid != os.getpid():
        raise BackendNotInitialized(
            "this process was forked from one with a process group; the group's sockets belong to the parent",
            hint="initialise in the child only, or start children with the 'spawn' method",
            parent_pid=_world.pid,
            pid=os.getpid(),
        )
    if dist.is_initialized():
        raise InvalidArgument(
            "the process group is initialised already",
            hint="call init() once; destroy_process_group() before a new start",
            backend=dist.get_backend(),
            world_size=dist.get_world_size(),
        )


def destroy_process_group() -> None:
    """Take the group down; doing it twice, or without a group, does nothing. Runs at interpreter exit too."""
    global _world
    atexit.unregister(destroy_process_group)
    if _world is not None and _world.pid != os.getpid():
        return
    if dist.is_initialized():
        size = dist.get_world_size()
        try:
            dist.destroy_process_group()
        except (TorshError, RuntimeError) as error:
            # Peers that died leave half-open sockets; the group is gone either way, and that is what was asked.
            _log.warning("the process group did not go down cleanly: %s", error)
        events.emit(events.MembershipEvent(action="left", world_size=size))
    _world = None


def is_initialized() -> bool:
    """Whether the world's group is up in this process."""
    return dist.is_available() and dist.is_initialized()


def _require_group() -> None:
    if not is_initialized():
        raise BackendNotInitialized("there is no process group in this process yet")


def _require_world() -> _World:
    if _world is None:
        raise BackendNotInitialized(
            "where the ranks live is not known: the group was not brought up by torsh_distributed.init()",
            hint="call torsh_distributed.init() instead of torch.distributed.init_process_group()",
        )
    return _world


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    """This process's rank in the world, or in `group` (-1 for a non-member)."""
    _require_group()
    return dist.get_rank(group)


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    """The number of ranks in the world, or in `group`."""
    _require_group()
    return dist.get_world_size(group)


def get_backend(group: dist.ProcessGroup | None = None) -> str:
    """The name of the backend in use."""
    _require_group()
    return str(dist.get_backend(group))


def roster() -> Roster:
    """Which ranks share a node, as learned when they met."""
    return _require_world().roster


def local_rank() -> int:
    """This process's index among the ranks of its node."""
    return roster().local_rank(get_rank())


def local_world_size() -> int:
    """The number of ranks on this node."""
    return len(roster().node_ranks(get_rank()))


def node_rank() -> int:
    """The index of this node among the nodes of the job."""
    return roster().node_rank(get_rank())


def device() -> torch.device:
    """The device of this rank: its own GPU where there is one, else the CPU.

    Raises InvalidArgument if the node has more ranks than visible GPUs: two ranks on one GPU is a mistake.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank() >= count:
        raise InvalidArgument(
            f"local rank {local_rank()} has no GPU of its own: {count} visible on this node",
            hint="start at most as many ranks per node as it has GPUs, or check CUDA_VISIBLE_DEVICES",
            local_rank=local_rank(),
            visible_gpus=count,
        )
    return torch.device("cuda", local_rank())


def validate_rank(rank: int, *, group: dist.ProcessGroup | None = None) -> None:
    """Raise RankOutOfBounds unless 0 <= rank < the group's size."""
    size = get_world_size(group)
    if not 0 <= rank < size:
        raise RankOutOfBounds(f"rank {rank} is outside 0..{size - 1}", rank=rank, world_size=size)
