"""The world's process group: bring it up, ask about it, take it down.

torch keeps the group itself; this module keeps only what torch does not know: on which nodes the ranks run, and which
process made the group, so a forked child cannot use its parent's sockets.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from torsh_distributed import events
from torsh_distributed.comm.backends.capabilities import choose_backend, why_unusable
from torsh_distributed.comm.backends.gloo import new_connections, patient_threads
from torsh_distributed.comm.backends.lifecycle import GroupLifecycle
from torsh_distributed.comm.groups.abort import (
    forget_group,
    forming,
    remember_connections,
    taking_down,
)
from torsh_distributed.comm.groups.rank_device import gpus_for_ranks, rank_device
from torsh_distributed.comm.meeting.network_interface import job_interface, tell_backends
from torsh_distributed.comm.meeting.rendezvous import Roster, join, open_store
from torsh_distributed.comm.meeting.store_meeting import StoreMeeting, wait_for_keys
from torsh_distributed.comm.torch_internals import _set_pg_timeout
from torsh_distributed.comm.torch_internals import _world as torch_world
from torsh_distributed.comm.trust.job_tls import require_encryption
from torsh_distributed.errors import (
    BackendNotInitialized,
    FeatureNotAvailable,
    InvalidArgument,
    OperationTimeout,
    RankOutOfBounds,
    TorshError,
    translate_errors,
)
from torsh_distributed.plan.sections.recovery import RetryConfig

_log = logging.getLogger(__name__)

_BRING_UP_TIMEOUT_S = 10.0
_CLOCK_LIMIT_S = 5.0


@dataclass(frozen=True)
class _World:
    pid: int
    rank: int
    roster: Roster
    # Kept alive: rank 0 hosts the store in this object, and later groups meet through it.
    store: dist.Store
    prefixed: dist.Store
    backend: str
    timeout_s: float
    master_port: int
    told: tuple[str, ...]
    """Environment variables that name the network interface to torch's backends, set while the world is up."""
    node: str | None
    """The name of this rank's node, where its launcher gave one."""
    device: torch.device | None = None
    """The device that the caller bound this rank to."""
    generation: int = 0


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
    num_local_ranks: int | None = None,
    retry: RetryConfig | None = None,
    fallback: Sequence[str] = (),
    device: torch.device | None = None,
) -> None:
    """Meet the other ranks and bring up torch's default group; every rank calls this once.

    With `store` given, the ranks meet there; otherwise in a TCP store at the master's address, hosted by the launcher
    (`has_agent_store`) or by rank 0. Keys are prefixed with the attempt, so a restarted world sees no stale ones.
    `num_local_ranks` is how many ranks the launcher has on this node, of which one that joins late sees none at first.
    `fallback` names what to take, in this order, if some rank cannot use `backend`: all ranks take the same. `device`
    is this rank's, chosen by the caller. Nothing is left behind after a failure, so the call may be retried.
    """
    global _world
    _refuse_second_start()
    candidates = (backend, *fallback)
    if not fallback:
        choose_backend(backend)  # what cannot be used here is refused before ranks meet
    if store is None:
        store = _meeting_store(
            (master_addr, master_port),
            rank=rank,
            world_size=world_size,
            has_agent=has_agent_store,
            timeout_s=timeout_s,
            retry=retry,
        )
    prefixed = dist.PrefixStore(f"torsh/{attempt}", store)
    with translate_errors("rendezvous", rank=rank, world_size=world_size):
        roster = join(
            prefixed,
            rank=rank,
            world_size=world_size,
            timeout_s=timeout_s,
            node=node,
            num_gpus=gpus_for_ranks(num_local_ranks),
            has_gpu=torch.cuda.device_count() > 0,
            unusable_backends={name: reason for name in candidates if fallback and (reason := why_unusable(name))},
        )
    try:
        taken = _first_usable(candidates, roster)
        chosen = choose_backend(taken, device_type="cuda" if roster.has_gpu_each else "cpu")
        if not roster.shares_loopback:
            require_encryption(chosen)
    except TorshError:
        # All ranks refuse alike. Rank 0 may host the store, and stays until the others have read the roster.
        StoreMeeting(
            prefixed, rank=rank, num_ranks=world_size, timeout_s=timeout_s, operation="init_process_group"
        ).leave()
        raise
    if not roster.shares_loopback:
        _warn_of_clock(roster, rank)
    told = tell_backends(job_interface(master_addr, is_one_host=roster.shares_loopback), os.environ)
    try:
        _bring_up(
            chosen,
            prefixed,
            rank=rank,
            world_size=world_size,
            timeout_s=timeout_s,
            store_port=master_port,
            device=device,
        )
    except BaseException:
        _withdraw(told)
        raise
    _world = _World(os.getpid(), rank, roster, store, prefixed, chosen, timeout_s, master_port, told, node, device)
    events.set_rank(rank)
    _tell_choice(chosen, taken, candidates, roster, rank)
    events.emit(events.MembershipEvent(action="joined", world_size=world_size, attempt=attempt))
    atexit.register(destroy_process_group)


def _meeting_store(
    address: tuple[str, int],
    *,
    rank: int,
    world_size: int,
    has_agent: bool,
    timeout_s: float,
    retry: RetryConfig | None,
) -> dist.Store:
    """The store at the master's address, which its launcher serves (`has_agent`) or rank 0."""
    if world_size == 1 and not has_agent:
        return dist.HashStore()  # no other rank: no port is opened, so jobs of one rank never collide
    is_host = rank == 0 and not has_agent
    return open_store(*address, is_host=is_host, timeout_s=timeout_s, has_torch_agent=has_agent, policy=retry)


def _first_usable(candidates: Sequence[str], roster: Roster) -> str:
    """The first backend that every rank can use: a pure function of the roster, so all ranks take the same."""
    for name in candidates:
        if name not in roster.unusable_backends:
            return name
    raise FeatureNotAvailable(
        "no backend of distributed.backend and distributed.fallback can be used on every rank: "
        + "; ".join(roster.unusable_backends[name] for name in candidates),
        hint="add 'auto' to the fallback to take the best one that every rank has",
        backends=list(candidates),
    )


def _tell_choice(chosen: str, taken: str, candidates: Sequence[str], roster: Roster, rank: int) -> None:
    """Events for a backend that the user has not named: a fallback, or what `auto` chose."""
    passed_over = candidates[: candidates.index(taken)]
    if passed_over:
        reason = "; ".join(roster.unusable_backends[name] for name in passed_over)
        if rank == 0:
            _log.warning("the ranks fall back to backend %r: %s", taken, reason)
        events.emit(events.DecisionEvent(subject="backend fallback", choice=taken, reason=reason))
    if taken == "auto":
        shared = "ranks share a GPU" if roster.has_gpus else "there is no GPU for every rank"
        reason = "every rank has a GPU" if roster.has_gpu_each else shared
        events.emit(events.DecisionEvent(subject="backend", choice=chosen, reason=reason))


def _warn_of_clock(roster: Roster, rank: int) -> None:
    """One rank of each node reports a clock that is far from rank 0's, under launchers that do not compare them too."""
    ahead_s = roster.clock_ahead_s
    if abs(ahead_s) < _CLOCK_LIMIT_S or roster.local_rank(rank) != 0:
        return
    message = (
        f"the clock of rank {rank}'s node is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} rank 0's: "
        "times of events will not compare"
    )
    _log.warning("%s", message)
    events.emit(events.LogEvent(level="warning", message=message))


def _withdraw(told: Sequence[str]) -> None:
    for name in told:
        os.environ.pop(name, None)


def _bring_up(
    backend: str,
    store: dist.Store,
    *,
    rank: int,
    world_size: int,
    timeout_s: float,
    store_port: int,
    device: torch.device | None,
) -> None:
    """torch's default group, with its connections kept for `abort` to cut."""
    with (
        translate_errors("init_process_group", rank=rank, backend=backend),
        patient_threads() if "gloo" in backend else nullcontext(),
        new_connections(except_port=store_port) as connections,
        forming(connections),
    ):
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("c10d", store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
            # torch binds groups to accelerators only, and connects those at once.
            device_id=None if device is None or device.type == "cpu" else device,
        )
    world = dist.group.WORLD
    assert world is not None
    remember_connections(world, connections)
    _await_all(store, world_size, timeout_s)


def _await_all(store: dist.Store, world_size: int, timeout_s: float) -> None:
    """Return when every rank has its group: rank 0 may host the store and must not leave while others connect."""
    if store.add("up", 1) == world_size:
        store.set("all-up", "")
    if not wait_for_keys(store, ["all-up"], timeout_s):
        raise OperationTimeout(
            f"only {store.add('up', 0)} of {world_size} ranks brought their group up within {timeout_s:g} s",
            hint="look at the output of the others: their backend could not connect",
            operation="init_process_group",
        )
    # Rank 0 leaves last: the others have read the store before it can go away with its host.
    if dist.get_rank() != 0:
        if store.add("seen", 1) == world_size - 1:
            store.set("all-seen", "")
    elif world_size > 1:
        wait_for_keys(store, ["all-seen"], timeout_s)


def regroup(survivors: Sequence[int], *, timeout_s: float | None = None) -> int:
    """A new world of `survivors` (ranks of the present one), in that order; returns this process's new rank.

    Every survivor calls this with the same list, after `abort`. The old group and all its sub-groups are destroyed;
    the new one meets under a store prefix of its own. Needs the store: if rank 0 hosted it and is lost, this fails.
    """
    global _world
    old = _require_world()
    members = list(survivors)
    me = dist.get_rank()
    if (
        len(set(members)) != len(members)
        or me not in members
        or any(not 0 <= r < dist.get_world_size() for r in members)
    ):
        raise InvalidArgument(
            "survivors must be ranks of the present world, each once, and include the caller",
            survivors=members,
            rank=me,
            world_size=dist.get_world_size(),
        )
    limit_s = old.timeout_s if timeout_s is None else timeout_s
    _take_down()
    generation = old.generation + 1
    store = dist.PrefixStore(f"generation/{generation}", old.prefixed)
    new_rank = members.index(me)
    with translate_errors("regroup", rank=new_rank, world_size=len(members)):
        found = join(store, rank=new_rank, world_size=len(members), timeout_s=limit_s, node=old.node)
    _bring_up(
        old.backend,
        store,
        rank=new_rank,
        world_size=len(members),
        timeout_s=limit_s,
        store_port=old.master_port,
        device=old.device,
    )
    found = _where_they_are(found, old)
    _world = replace(old, rank=new_rank, roster=found, timeout_s=limit_s, generation=generation)
    events.set_rank(new_rank)
    events.emit(events.MembershipEvent(action="regrouped", world_size=len(members), attempt=generation))
    return new_rank


def _where_they_are(found: Roster, old: _World) -> Roster:
    """The models of those who stay are where they are, however many ranks share the GPUs now."""
    return replace(found, has_gpu_each=old.roster.has_gpu_each, has_gpus=old.roster.has_gpus)


def enter_world(store: dist.Store, *, rank: int, world_size: int, epoch: int, timeout_s: float) -> None:
    """Leave the present world, aborted or not, for one of other members, which meet in `store`; each calls this.

    Unlike `regroup` it takes processes that were in no world before. `timeout_s` bounds the wait for all to arrive;
    operations keep the timeout they had. After a failure there is no world, and the call may be repeated with another
    store.
    """
    global _world
    old = _require_world()
    if dist.is_initialized():
        _take_down()
    with translate_errors("regroup", rank=rank, world_size=world_size):
        found = join(store, rank=rank, world_size=world_size, timeout_s=timeout_s, node=old.node)
    try:
        # All have arrived: what takes long now is a member that died in between, and gloo would try it until the end.
        limit_s = min(timeout_s, _BRING_UP_TIMEOUT_S)
        _bring_up(
            old.backend,
            store,
            rank=rank,
            world_size=world_size,
            timeout_s=limit_s,
            store_port=old.master_port,
            device=old.device,
        )
    except BaseException:
        if dist.is_initialized():
            _take_down()
        raise
    _set_timeout(timedelta(seconds=old.timeout_s))
    found = _where_they_are(found, old)
    _world = replace(old, rank=rank, roster=found, store=store, prefixed=store, generation=epoch)
    events.set_rank(rank)
    events.emit(events.MembershipEvent(action="regrouped", world_size=world_size, attempt=epoch))


def _set_timeout(timeout: timedelta) -> None:
    world = dist.group.WORLD
    assert world is not None
    if isinstance(world, GroupLifecycle):
        world.set_timeout(timeout)
    else:
        _set_pg_timeout(timeout, world)


def _take_down() -> None:
    """Destroy torch's groups. Peers that died leave half-open sockets; the group is gone all the same."""
    with taking_down:
        names = [group.group_name for group in torch_world.pg_map]
        try:
            dist.destroy_process_group()
        except (TorshError, RuntimeError) as error:
            _log.warning("the process group did not go down cleanly: %s", error)
        for name in names:
            forget_group(name)


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
    """Destroy the group; a second call, or one without a group, does nothing. Runs at interpreter exit too."""
    atexit.unregister(destroy_process_group)
    if _world is not None and _world.pid != os.getpid():
        return
    if dist.is_initialized():
        size = dist.get_world_size()
        error = sys.exception()
        if error is not None:
            # Before the others see this rank leave: whoever supervises them can then tell cause from consequence.
            events.emit(events.MembershipEvent(action="leaving", world_size=size, detail=type(error).__name__))
        try:
            for call in list(_before_destroy):
                call()
        finally:
            _before_destroy.clear()
            _take_down()
            events.emit(events.MembershipEvent(action="left", world_size=size))
            _forget_world()
    _forget_world()


def _forget_world() -> None:
    global _world
    if _world is not None:
        _withdraw(_world.told)
    _world = None


_before_destroy: list[Callable[[], None]] = []


def before_destroy(call: Callable[[], None]) -> Callable[[], None]:
    """Call `call` when the group is destroyed, while it still works; returns a function that takes this back.

    For work in the background that needs the group to end well, such as a checkpoint being written.
    """
    _before_destroy.append(call)

    def forget() -> None:
        if call in _before_destroy:
            _before_destroy.remove(call)

    return forget


def is_initialized() -> bool:
    """Whether the world's group is up in this process."""
    return dist.is_available() and dist.is_initialized()


def _require_group() -> None:
    if not is_initialized():
        raise BackendNotInitialized("there is no process group in this process yet")


def _require_world() -> _World:
    if _world is None:
        raise BackendNotInitialized(
            "the nodes of the ranks are unknown: the group was not brought up by torsh_distributed.init()",
            hint="call torsh_distributed.init() instead of torch.distributed.init_process_group()",
        )
    return _world


def rank(group: dist.ProcessGroup | None = None) -> int:
    """This process's rank in the world, or in `group` (-1 for a non-member)."""
    _require_group()
    return dist.get_rank(group)


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """The number of ranks in the world, or in `group`."""
    _require_group()
    return dist.get_world_size(group)


def backend(group: dist.ProcessGroup | None = None) -> str:
    """The name of the backend in use."""
    _require_group()
    return str(dist.get_backend(group))


def store() -> dist.Store:
    """The store in which the group's ranks met: for what they tell each other, under keys of their own."""
    _require_group()
    world = dist.group.WORLD
    assert world is not None, "it was asked for"
    return torch_world.pg_map[world][1]


def roster() -> Roster:
    """Which ranks share a node, as found at the rendezvous."""
    return _require_world().roster


def local_rank() -> int:
    """This process's index among the ranks of its node."""
    return roster().local_rank(rank())


def local_world_size() -> int:
    """The number of ranks on this node."""
    return len(roster().node_ranks(rank()))


def node_rank() -> int:
    """The index of this node among the nodes of the job."""
    return roster().node_rank(rank())


def device() -> torch.device:
    """The device of this rank: the one it was bound to, else the GPU of its local rank, else the CPU.

    It is a GPU of its own if every rank of the world has one, else one that ranks share.
    A line says so where it is not its own. Ranks share GPUs on our backends alone, of which `auto` then takes one.
    Raises InvalidArgument if NCCL was asked for and a node has more ranks than visible GPUs.
    """
    if _world is not None and _world.device is not None:
        return _world.device
    if not torch.cuda.is_available():
        return torch.device("cpu")
    world = _require_world()
    return rank_device(
        local_rank(),
        num_local_ranks=local_world_size(),
        num_gpus=torch.cuda.device_count(),
        roster=world.roster,
        backend=world.backend,
    )


def validate_rank(rank: int, *, group: dist.ProcessGroup | None = None) -> None:
    """Raise RankOutOfBounds unless 0 <= rank < the group's size."""
    size = world_size(group)
    if not 0 <= rank < size:
        raise RankOutOfBounds(f"rank {rank} is outside 0..{size - 1}", rank=rank, world_size=size)
