"""The events: immutable records of what happened, with numbers in named units.

Every event carries the wall-clock `time` of its creation and the `rank` it happened on (-1 before
the rank is known). A field that was not measured is None, never a plausible constant.
"""

from __future__ import annotations

import time as _clock
from dataclasses import dataclass, field
from typing import ClassVar, Literal

Phase = Literal["data", "forward", "backward", "optimizer", "schedule", "stage"]
"""The parts of a step. A schedule is a pipeline's, from first microbatch to last; a stage computes inside it."""

_rank = -1


def set_rank(rank: int) -> None:
    """Say which rank this process is; events made from here on carry it."""
    global _rank
    _rank = rank


def current_rank() -> int:
    """The rank that new events carry."""
    return _rank


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """What every event has: when it happened, and where."""

    kind: ClassVar[str] = "event"

    time: float = field(default_factory=_clock.time)
    """Wall-clock seconds since the epoch, to line up ranks; durations come from a monotonic clock."""

    rank: int = field(default_factory=current_rank)
    """The rank in the world, or -1 before it is known (also in launchers)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEvent(Event):
    """One optimizer update was done, or skipped after an overflow of fp16."""

    kind: ClassVar[str] = "step"

    step: int
    loss: float | None = None
    duration_s: float
    comm_s: float | None = None
    """Seconds the step spent waiting for communication, where that is measured."""
    num_samples: int | None = None
    num_tokens: int | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    loss_scale: float | None = None
    """What the loss was multiplied with before backward, under fp16."""
    is_skipped: bool = False
    """Whether gradients overflowed: parameters are as before, and the step is tried again with the next batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveEvent(Event):
    """One collective or point-to-point operation ended, well or not."""

    kind: ClassVar[str] = "collective"

    op: str
    group: str
    sequence: int
    num_bytes: int
    start_s: float
    """Monotonic clock at the call."""
    duration_s: float
    peer: int | None = None
    call_site: str | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseEvent(Event):
    """A part of a step ended. Parts of one thread lie inside one another or apart."""

    kind: ClassVar[str] = "phase"

    phase: Phase
    start_s: float
    """Monotonic clock."""
    duration_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitEvent(Event):
    """A thread was held up by an operation of a group: in the call, or when it waited for one it had started.

    From the backends of this library, for all who use them: DDP, FSDP2, DTensor and pipelines of torch as well.
    """

    kind: ClassVar[str] = "wait"

    op: str
    group: str
    num_started: int
    """Operations that began with it: 1 in the call, 0 in a later wait."""
    num_bytes: int
    """Size of the tensors that the operation fills on this rank; a reduce-scatter counts before the cut."""
    start_s: float
    """Monotonic clock."""
    duration_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketEvent(Event):
    """A bucket of gradients was reduced."""

    kind: ClassVar[str] = "bucket"

    step: int
    index: int
    num_bytes: int
    duration_s: float
    codec: str | None = None
    wire_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEvent(Event):
    """Memory in use on a device, from its allocator."""

    kind: ClassVar[str] = "memory"

    device: str
    allocated_bytes: int
    peak_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointEvent(Event):
    """A checkpoint was saved, verified or loaded."""

    kind: ClassVar[str] = "checkpoint"

    action: str
    path: str
    step: int
    num_bytes: int | None = None
    duration_s: float | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MembershipEvent(Event):
    """The world came together, changed or ended."""

    kind: ClassVar[str] = "membership"

    action: str
    """joined, left, regrouped, restarted, lost or ended."""
    world_size: int
    attempt: int = 0
    detail: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingEvent(Event):
    """A mixture-of-experts layer routed a batch; numbers are of all ranks that share it."""

    kind: ClassVar[str] = "routing"

    num_tokens: int
    num_routed: int
    """Choices of experts that were computed; each token makes one or more."""
    num_dropped: int
    load: tuple[int, ...]
    """Rows of each expert."""
    load_variation: float
    """Standard deviation over mean of the load."""
    capacity_use: float | None
    gate_entropy: float
    """On this rank, in nats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RebalanceEvent(Event):
    """Experts moved between ranks; loads are shares of all choices."""

    kind: ClassVar[str] = "rebalance"

    layer: str
    num_moved: int
    max_load_before: float
    """Of the busiest rank, under the old placement."""
    max_load_after: float
    """The same loads under the new one."""
    moved_bytes: int
    """Weights and optimizer state that left this rank."""
    duration_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LendingEvent(Event):
    """Other experts than before are lent to ranks that have less to do; loads are shares of all rows."""

    kind: ClassVar[str] = "lending"

    layer: str
    borrowed: tuple[tuple[int, ...], ...]
    """By rank of the group: the experts of other ranks that it computes as well."""
    max_load_before: float
    """Of the busiest rank, if nothing were lent."""
    max_load_after: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PressureEvent(Event):
    """Memory under a budget ran short and something was done about it; the bytes were counted on both sides."""

    kind: ClassVar[str] = "pressure"

    action: str
    """free unused, offload cold, shrink prefetch or smaller form."""
    memory: str
    """Which memory: device memory, host memory or disk space."""
    before_bytes: int
    after_bytes: int
    budget_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DecisionEvent(Event):
    """The library chose for the user (a backend, a fallback, a codec); `reason` says why."""

    kind: ClassVar[str] = "decision"

    subject: str
    choice: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AlertEvent(Event):
    """Something needs a person's attention."""

    kind: ClassVar[str] = "alert"

    severity: str
    name: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LogEvent(Event):
    """A line of prose, for the record beside the numbers."""

    kind: ClassVar[str] = "log"

    level: str
    message: str
    step: int | None = None


_EVENT_TYPES: tuple[type[Event], ...] = (
    StepEvent,
    CollectiveEvent,
    PhaseEvent,
    WaitEvent,
    BucketEvent,
    MemoryEvent,
    CheckpointEvent,
    MembershipEvent,
    RoutingEvent,
    RebalanceEvent,
    LendingEvent,
    PressureEvent,
    DecisionEvent,
    AlertEvent,
    LogEvent,
)


def event_types() -> dict[str, type[Event]]:
    """Every event class by its `kind`, which is the `type` in JSON lines."""
    return {event.kind: event for event in _EVENT_TYPES}
