"""What a process knows while Horovod is initialised: its place, its process sets and their engines, its handles."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torsh_distributed.migrate.horovod.horovod_errors import not_initialized
from torsh_distributed.migrate.horovod.negotiation.request import EngineSettings, PendingOp, Request
from torsh_distributed.migrate.horovod.negotiation.set_engine import SetEngine
from torsh_distributed.migrate.horovod.negotiation.timeline_file import TimelineFile


@dataclass
class RegisteredSet:
    """A process set with an id. `ranks` are Horovod's, `engine` is None on a rank that is not in it."""

    ranks: list[int]
    engine: SetEngine | None
    optimizers: Iterator[int] = field(default_factory=itertools.count)
    """Numbers for the set's optimizers, equal on its ranks, for the names of their buckets."""
    unnamed: Iterator[int] = field(default_factory=itertools.count)
    """Numbers for operations without a name. By set: ranks of other sets do not make these calls."""
    num_joins: int = 0
    """How often all ranks have joined."""
    repeated: dict[str, tuple[tuple[Any, ...], Request, bool]] = field(default_factory=dict)
    """By name, the all-reduce that this rank submitted last: what was said about it, its request, if it may gather."""


class JoinedSet(RegisteredSet):
    """A process set that this process is in."""

    engine: SetEngine


@dataclass
class WorldState:
    """Everything between `init` and `shutdown`."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    is_homogeneous: bool
    members: list[int]
    """Horovod's ranks as ranks of the torch world."""
    settings: EngineSettings
    allows_dynamic_sets: bool
    allows_timeline: bool
    sets: dict[int, RegisteredSet] = field(default_factory=dict)
    handles: dict[int, tuple[PendingOp, SetEngine]] = field(default_factory=dict)
    """Asynchronous operations that were not waited for yet."""
    counter: Iterator[int] = field(default_factory=itertools.count)
    set_changes: Iterator[int] = field(default_factory=itertools.count)
    """Numbers for sets that are added and removed, equal on all ranks."""
    next_set_id: int = 1
    timeline: TimelineFile | None = None


_state: WorldState | None = None


def world() -> WorldState:
    """The state of this process. Raises InvalidArgument before `init` and after `shutdown`."""
    if _state is None:
        raise not_initialized()
    return _state


def is_up() -> bool:
    """Whether `init` was called in this process; a forked child starts without."""
    return _state is not None


def set_world(state: WorldState | None) -> None:
    """Called by `init` and `shutdown`."""
    global _state
    _state = state


def _forget_in_child() -> None:
    """A forked child has neither the engines' threads nor its own links."""
    set_world(None)


os.register_at_fork(after_in_child=_forget_in_child)
