"""Release what is blocked: `abort` ends every operation of a group on this rank, whatever its backend."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from torsh_distributed import events
from torsh_distributed.comm.backends.gloo import Connections
from torsh_distributed.comm.backends.lifecycle import GroupLifecycle
from torsh_distributed.comm.torch_internals import _world
from torsh_distributed.errors import CommunicationError, FeatureNotAvailable

_connections: dict[str, Connections] = {}
_reasons: dict[str, str] = {}
_forming: list[Connections] = []
taking_down = threading.Lock()
"""Held while groups are destroyed: names are used again, and an abort must not hit the next group of a name."""


@contextmanager
def forming(connections: Connections) -> Iterator[None]:
    """Around the making of a world: `abort_all` from another thread ends it."""
    _forming.append(connections)
    try:
        yield
    finally:
        _forming.remove(connections)


def remember_connections(group: dist.ProcessGroup, connections: Connections) -> None:
    """Keep the connections that abort must cut; called by whatever creates a group."""
    _connections[group.group_name] = connections


def forget_group(name: str) -> None:
    """Drop what is kept for a group that was taken down."""
    _connections.pop(name, None)
    _reasons.pop(name, None)


def abort(reason: str, *, group: dist.ProcessGroup | None = None) -> None:
    """Release every blocked operation of `group` (default: the world) on this rank within 50 ms; it then refuses work.

    Call it from any thread. Peers see their connections to this rank close; tell them through the store or the launcher
    to abort too. Tensors of released operations are invalid.
    """
    chosen = group if group is not None else dist.group.WORLD
    if chosen is None:
        raise CommunicationError(
            "there is no group to abort", hint="abort after init(), before destroy_process_group()"
        )
    name = chosen.group_name
    _reasons[name] = reason
    events.emit(events.LogEvent(level="warning", message=f"group {name} aborted: {reason}"))
    if isinstance(chosen, GroupLifecycle):
        chosen.abort(reason)
        return
    for device in chosen._device_types:
        backend = chosen._get_backend(device)
        if backend.name() == "nccl":
            backend.abort()
    connections = _connections.get(name)
    if connections is None:
        raise FeatureNotAvailable(
            "this group was not made by torsh_distributed, so its connections are unknown",
            hint="make it with torsh_distributed.init() or GroupManager.create_group()",
            group=name,
        )
    connections.cut()


def abort_all(reason: str) -> None:
    """`abort` every group of this process, and a world that is being made; groups that cannot be are left.

    Call it from any thread.
    """
    for connections in list(_forming):
        connections.cut()
    with taking_down:
        for group in list(_world.pg_map):
            if group.group_name in _reasons:
                continue
            try:
                abort(reason, group=group)
            except FeatureNotAvailable as error:
                events.emit(events.LogEvent(level="warning", message=error.message))


def refuse_if_aborted(group: dist.ProcessGroup, operation: str) -> None:
    """Raise CommunicationError with the reason if the group was aborted on this rank."""
    if _reasons and group.group_name in _reasons:
        raise aborted(group, operation)


def aborted(group: dist.ProcessGroup, operation: str) -> CommunicationError:
    """The error of an operation on an aborted group."""
    return CommunicationError(
        f"the group was aborted: {_reasons[group.group_name]}",
        hint="bring up a new group with regroup(survivors), or restart",
        operation=operation,
        group=group.group_name,
    )


def is_aborted(group: dist.ProcessGroup) -> bool:
    """Whether `abort` was called for this group on this rank."""
    return group.group_name in _reasons
