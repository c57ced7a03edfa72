"""The events: immutable records of what happened, with units in the field names.

Every event has the wall-clock `time` of its creation and the `rank` it happened on (-1 before the rank is known). A
field that was not measured is None.
"""

from __future__ import annotations

import time as _clock
from dataclasses import dataclass, field
from typing import ClassVar, Literal

Phase = Literal["data", "forward", "backward", "optimizer", "schedule", "stage"]
"""The parts of a step. A pipeline's schedule runs from first to last microbatch; stages compute inside it."""

IncidentStatus = Literal["open", "resolved", "failed"]
"""resolved: a step was completed after the action. failed: the action did not help and the error was raised."""

_rank = -1


def set_rank(rank: int) -> None:
    """Set the rank of this process, for events created from now on."""
    global _rank
    _rank = rank


def current_rank() -> int:
    """The rank of new events."""
    return _rank


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """The fields of every event: when and where it happened."""

    kind: ClassVar[str] = "event"

    time: float = field(default_factory=_clock.time)
    """Wall-clock seconds since the epoch, to align ranks; durations come from a monotonic clock."""

    rank: int = field(default_factory=current_rank)
    """The rank in the world; -1 before it is known, and in launchers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEvent(Event):
    """One optimizer update was done, or skipped after an fp16 overflow."""

    kind: ClassVar[str] = "step"

    step: int
    loss: float | None = None
    duration_s: float
    comm_s: float | None = None
    """Seconds the step waited for communication, if measured."""
    num_samples: int | None = None
    num_tokens: int | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    loss_scale: float | None = None
    """Factor of the loss before backward, with fp16."""
    is_skipped: bool = False
    """Whether gradients overflowed: parameters are unchanged, and the next batch repeats the step number."""
    epoch: int | None = None
    """Passes over the data that were complete before it; None in a loop that does not take `engine.batches`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationEvent(Event):
    """The model was evaluated; every rank reports the same loss."""

    kind: ClassVar[str] = "evaluation"

    step: int
    loss: float
    duration_s: float
    """On this rank, from the call to the loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileEvent(Event):
    """The first call of a compiled function ended; torch compiles in it, and its backward in the first backward."""

    kind: ClassVar[str] = "compile"

    function: str
    progress: str
    """Which one of how many, as in `3 of 12`; empty for a single function."""
    duration_s: float
    graph_breaks: tuple[str, ...] = ()
    """Why parts of it could not be compiled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveEvent(Event):
    """One collective or point-to-point operation ended, with or without an error."""

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
    """A part of a step ended. Phases of one thread are nested or disjoint."""

    kind: ClassVar[str] = "phase"

    phase: Phase
    start_s: float
    """Monotonic clock."""
    duration_s: float
    thread: int | None = None
    """Tells the threads of a process apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitEvent(Event):
    """A thread waited for an operation of a group: in the call, or later for one it had started.

    The library's backends emit it for all callers, including torch's DDP, FSDP2, DTensor and pipelines.
    """

    kind: ClassVar[str] = "wait"

    op: str
    group: str
    num_started: int
    """Operations started: 1 in the call, 0 in a later wait."""
    num_bytes: int
    """Size of the tensors that the operation fills on this rank; for reduce-scatter, of its input."""
    start_s: float
    """Monotonic clock."""
    duration_s: float
    sequence: int | None = None
    """The group's number of a collective that was started here; the same on every rank."""
    thread: int | None = None
    """Tells the threads of a process apart."""


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
    """Memory in use: on a device from its allocator, on the host from the kernel."""

    kind: ClassVar[str] = "memory"

    device: str
    allocated_bytes: int
    peak_bytes: int
    limit_bytes: int | None = None
    """Where it ends: the device's memory, the control group's or the process's limit, or the machine's memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareEvent(Event):
    """What a device measures about itself; None for what it does not."""

    kind: ClassVar[str] = "hardware"

    device: str
    celsius: float | None = None
    limit_celsius: float | None = None
    """Where it slows itself down or switches off."""
    corrected_errors: int | None = None
    """Errors that its memory corrected, since it was started."""
    uncorrected_errors: int | None = None
    utilization: float | None = None
    """Share of time in which a GPU ran a kernel, from 0 to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnergyEvent(Event):
    """What one meter of a node counted in an interval that ended at `time`."""

    kind: ClassVar[str] = "energy"

    node: int
    """Rank of the node."""
    meter: str
    """Such as `gpu 0` or `package-0`; unique on its node."""
    source: str
    """nvml, rapl, hwmon or estimate."""
    is_measured: bool
    """False for an estimate."""
    joules: float
    duration_s: float
    ranks: tuple[int, ...] = ()
    """Ranks that share it."""
    g_per_kwh: float | None = None
    """Carbon intensity of the grid in the interval; None if it is not known."""
    detail: str | None = None
    """How an estimate is made, or why a meter could not be read."""
    epoch: int | None = None
    """The epoch that ranks of the node were in, from 0; None where nobody told."""
    utilization: float | None = None
    """Share of time in which the device computed, from 0 to 1; None where it does not tell."""
    celsius: float | None = None
    num_others: int = 0
    """Processes of other jobs that compute on the device: their energy is in `joules`."""
    own_share: float | None = None
    """This job's part of the device's computing time beside them; None where the driver does not tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CarbonEvent(Event):
    """The grid's carbon intensity that the energy from now on is counted with."""

    kind: ClassVar[str] = "carbon"

    g_per_kwh: float | None
    """None if there is none: then no grams are counted."""
    source: str
    """file, gb, electricity_maps, watttime, country or fixed."""
    zone: str
    signal: str
    """average or marginal."""
    basis: str
    """measured, forecast, yearly mean or given."""
    valid_from: float | None = None
    """Seconds since the epoch, as `time`."""
    age_s: float | None = None
    """How long ago the value's period ended, or began if it lasts; None for one without a time."""
    is_stale: bool = False
    renewable_share: float | None = None
    """From 0 to 1, where the feed tells it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleEvent(Event):
    """The policy on energy decided whether the job trains, and with how many workers."""

    kind: ClassVar[str] = "schedule"

    action: str
    """train, reduce, hold (go on later) or defer (begin later)."""
    workers: int
    """That train; 0 in a hold."""
    reason: str
    deadline: float | None = None
    """Seconds since the epoch, as `time`."""
    done_at: float | None = None
    """When the job will be done by the plan."""
    resumes_at: float | None = None
    """When a hold will end by the plan."""
    planned_grams: float | None = None
    """CO2 of the rest by the plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetEvent(Event):
    """How much of a budget of energy or CO2 is spent, over all nodes and all starts of the run."""

    kind: ClassVar[str] = "budget"

    name: str
    """energy or CO2, of all or `of this epoch`."""
    spent: float
    limit: float
    unit: str
    """kWh or kg."""
    action: str
    """ok, warn, slow or stop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointEvent(Event):
    """A checkpoint was copied, saved, uploaded or loaded, or a copy of it went to another rank's memory."""

    kind: ClassVar[str] = "checkpoint"

    action: str
    """copied (training waited for it), saved, uploaded, damaged; loaded (training goes on from it), model loaded (only
    the model's part), found (on disk, while training goes on from memory); replica copied, stored, skipped, failed or
    loaded."""
    path: str
    step: int
    num_bytes: int | None = None
    duration_s: float | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplesEvent(Event):
    """A step was committed with these samples of this rank; emitted only where somebody asks for it."""

    kind: ClassVar[str] = "samples"

    step: int
    """Updates done before it. A step that is undone and done again is reported again: the last reports count."""
    epoch: int
    batch: int
    """The batch's number in the epoch."""
    start: int | None = None
    """Samples of the epoch before it; None in an epoch that a state of an earlier version began."""
    total: int
    """Samples of the batch, over all ranks."""
    members: tuple[int, ...]
    """Whose share this is: the rank that reports, or ranks that were lost before they could."""
    ids: tuple[int, ...]
    """Indices of the dataset, or rows of the batch for a stream."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IncidentEvent(Event):
    """A failure was noticed, acted on, or is over. Also appended to `incidents.jsonl` at once, beside the events."""

    kind: ClassVar[str] = "incident"

    incident: str
    """Equal for all events of one incident."""
    failure: str
    """What failed: out_of_memory, divergence, storage, lost_rank, …"""
    status: IncidentStatus
    action: str
    """What is done about it."""
    step: int | None = None
    detail: str | None = None
    duration_s: float | None = None
    """From `open` to the end of the incident."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MembershipEvent(Event):
    """The world came together, changed or ended."""

    kind: ClassVar[str] = "membership"

    action: str
    """joined, leaving (an exception is on its way), left, regrouped, continued (how an interrupted step is
    finished), restarted, lost, recovered, scaling, health or ended."""
    world_size: int
    attempt: int = 0
    detail: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingEvent(Event):
    """A mixture-of-experts layer routed a batch; numbers cover all ranks that share it."""

    kind: ClassVar[str] = "routing"

    num_tokens: int
    num_routed: int
    """Choices of experts that were computed; each token has one or more."""
    num_dropped: int
    load: tuple[int, ...]
    """Rows of each expert."""
    load_variation: float
    """Standard deviation over mean of the load."""
    capacity_use: float | None
    gate_entropy: float
    """On this rank, in nats."""
    duration_s: float | None = None
    """Of the gate's decision on this rank, with what ranks tell each other for it; on a GPU by its own clock."""


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
    """The experts lent to less busy ranks changed; loads are shares of all rows."""

    kind: ClassVar[str] = "lending"

    layer: str
    borrowed: tuple[tuple[int, ...], ...]
    """By rank of the group: the experts of other ranks that it computes too."""
    max_load_before: float
    """Of the busiest rank, without lending."""
    max_load_after: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterEvent(Event):
    """This process pushed gradients to parameter servers, or pulled parameters from them."""

    kind: ClassVar[str] = "parameters"

    operation: Literal["push", "pull"]
    version: int
    """The newest version that this process has pulled, of any server."""
    num_bytes: int
    """As they travelled."""
    duration_s: float
    """With the wait for other workers."""
    staleness: int | None = None
    """Of a push: the steps of other workers between the version that it was computed from and its own step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PressureEvent(Event):
    """Memory under a budget ran short and offload reacted; bytes are measured before and after."""

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
class SuggestionEvent(Event):
    """A setting that would make the run faster and was not asked for; `torsh why` repeats it."""

    kind: ClassVar[str] = "suggestion"

    title: str
    evidence: str
    """What was measured, and where."""
    plan_change: str = ""
    """The change as text of a plan; empty if it does not change a plan."""
    gain: float | None = None
    """The share of `part` that it saves: at least, or at most if `is_bound`."""
    gain_s: float | None = None
    """Seconds that it saves in a step, whatever that takes."""
    gain_bytes: int | None = None
    """Memory of a rank that it saves at the peak; such a change is worth its time where memory is short."""
    part: str = "step"
    """What `gain` is a share of, as measured: step, busy (the step without waiting for ranks, data and stages), forward
    or bubble."""
    is_bound: bool = False
    """Whether the gain is the most there can be."""
    takes_memory: bool = False
    """Whether it is worth trying only where memory is free."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlertEvent(Event):
    """Something needs attention from a person."""

    kind: ClassVar[str] = "alert"

    severity: str
    name: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictionEvent(Event):
    """What the planner said of a step before the first one, from rates alone: without corrections by past runs."""

    kind: ClassVar[str] = "prediction"

    model: str
    mesh: str
    compute_s: float
    wait_s: float
    """Communication that computation does not hide."""
    optimizer_s: float
    bubble_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LogEvent(Event):
    """A log message, kept with the numbers."""

    kind: ClassVar[str] = "log"

    level: str
    message: str
    step: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FederatedRoundEvent(Event):
    """A federated round was accepted, and the global model updated."""

    kind: ClassVar[str] = "federated_round"

    round: int
    num_chosen: int
    num_updates: int
    num_attempts: int
    failures: dict[str, int]
    """Why clients did not count, to how many."""
    figures: dict[str, float]
    """Of the global model and of the clients' training."""
    bytes_up: int
    bytes_down: int
    duration_s: float
    epsilon: float | None = None
    """Of differential privacy, after this round."""
    num_planned: int | None = None
    """How many rounds the run is to have."""
    links: dict[str, float] = field(default_factory=dict)
    """Bytes per second of the last upload of those that were chosen, where one was measured."""


_EVENT_TYPES: tuple[type[Event], ...] = (
    StepEvent,
    CollectiveEvent,
    CompileEvent,
    EvaluationEvent,
    PhaseEvent,
    WaitEvent,
    BucketEvent,
    MemoryEvent,
    HardwareEvent,
    EnergyEvent,
    CarbonEvent,
    ScheduleEvent,
    BudgetEvent,
    CheckpointEvent,
    SamplesEvent,
    IncidentEvent,
    MembershipEvent,
    RoutingEvent,
    RebalanceEvent,
    LendingEvent,
    ParameterEvent,
    PressureEvent,
    DecisionEvent,
    SuggestionEvent,
    AlertEvent,
    PredictionEvent,
    LogEvent,
    FederatedRoundEvent,
)


def event_types() -> dict[str, type[Event]]:
    """Every event class by its `kind`, which is the `type` in JSON lines."""
    return {event.kind: event for event in _EVENT_TYPES}
