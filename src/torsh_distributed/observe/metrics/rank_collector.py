"""Fills the metrics of a rank from the event bus and the flight recorder; no layer is asked to do anything for it.

In the emitting thread a note or an event costs an append. It is looked at later, by `fold`, on the reporter's thread.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, Self

from torsh_distributed import events
from torsh_distributed.comm.recording.flight_recorder import OperationRecord, recorder
from torsh_distributed.comm.recording.span_account import StepSpans, covered_s
from torsh_distributed.events import step_notes
from torsh_distributed.observe.metrics.operation_rates import AxisOf, AxisRates, CompressionRates, RoutingRates
from torsh_distributed.observe.metrics.rank_metrics import RankMetrics
from torsh_distributed.observe.metrics.step_record import RunDelay, StepRecord, TrainingSpans

MAX_PENDING_EVENTS = 50_000
MAX_STEPS_A_SUMMARY = 400
MAX_MARKS_A_SUMMARY = 40
_MAX_TEXT_CHARS = 400
_LONG_S = 1e6
_LARGEST_SHORT = 3.4e38
_MAX_UNDER_WAY = 1000
_MARKS = (
    events.CheckpointEvent,
    events.MembershipEvent,
    events.IncidentEvent,
    events.DecisionEvent,
    events.PressureEvent,
    events.RebalanceEvent,
    events.CompileEvent,
    events.EvaluationEvent,
    events.AlertEvent,
    events.LogEvent,
)
_NUMBERS = (
    events.StepEvent,
    events.PhaseEvent,
    events.WaitEvent,
    events.CollectiveEvent,
    events.BucketEvent,
    events.MemoryEvent,
    events.RoutingEvent,
    events.ParameterEvent,
)


class RankCollector:
    """The metrics of this process. `attach` begins, `fold` adds up; `steps` and `marks` are what came since.

    `fold` may be called by one thread at a time. Beyond MAX_PENDING_EVENTS between two folds, new events are dropped
    and counted, and the oldest notes make room for new ones.
    """

    def __init__(self, metrics: RankMetrics | None = None) -> None:
        self.metrics = metrics if metrics is not None else RankMetrics()
        self.steps: deque[StepRecord] = deque(maxlen=MAX_STEPS_A_SUMMARY)
        """Steps that no summary has taken yet, newest last."""
        self.marks: deque[dict[str, Any]] = deque(maxlen=MAX_MARKS_A_SUMMARY)
        """Rare events that no summary has taken yet, as JSON records."""
        self.timeline: list[list[Any]] = []
        """The spans of one of the steps since the last summary: [name, start, seconds]."""
        self.timeline_step = 0
        """Which step that is: the roundest number, in twos, so that ranks choose the same one."""
        self._roundness = -1
        self._pending: deque[Any] = deque(maxlen=MAX_PENDING_EVENTS)
        """Notes, and events as (event, thread, moment, processor time of the thread or None)."""
        self._num_dropped = 0
        self._detach: Callable[[], None] | None = None
        self._thread = threading.main_thread().ident or 0
        self._training = TrainingSpans(time.monotonic())
        self._run_delay = RunDelay()
        self._unfinished: list[tuple[events.StepEvent, StepSpans, float | None]] = []
        self._has_begun = False
        self._is_replay = False
        self._averaged_group: str | None = None
        self._has_waits = False
        self._groups_with_waits: set[str] = set()
        self._looked_s = time.monotonic()
        self._last_seen: OperationRecord | None = None
        self._under_way: list[OperationRecord] = []
        self._waited_s = 0.0
        self._has_data = False
        self._new: list[tuple[events.StepEvent, StepRecord]] = []
        self._started: dict[str, list[int]] = {}
        self._flops_per_step: int | None = None
        self._peak_flops: float | None = None
        self._window: deque[tuple[StepRecord, int | None]] = deque(maxlen=20)
        self._compression = CompressionRates(self.metrics)
        self._routing = RoutingRates(self.metrics)
        self._axes = AxisRates(self.metrics)

    def attach(self) -> Self:
        """Take events from now on, until `detach`."""
        if self._detach is None:
            unsubscribe = events.subscribe(self._take, *_NUMBERS, *_MARKS, takes_notes=True)
            forget = step_notes.take_notes(self._pending.append)

            def detach() -> None:
                unsubscribe()
                forget()

            self._detach = detach
        return self

    def detach(self) -> None:
        """Stop taking records; the metrics stay. A second call does nothing."""
        detach, self._detach = self._detach, None
        if detach is not None:
            detach()

    def _take(self, event: events.Event) -> None:
        if len(self._pending) < MAX_PENDING_EVENTS:
            cpu_s = time.thread_time() if isinstance(event, events.StepEvent) else None
            self._pending.append((event, threading.get_ident(), time.monotonic(), cpu_s))
        else:
            self._num_dropped += 1

    def take_later(self, event: events.Event, *, now_s: float) -> None:
        """As if the training thread had emitted it at `now_s`; the next `fold` adds it up."""
        self._pending.append((event, self._thread, now_s, None))

    def take(self, event: events.Event, *, now_s: float) -> None:
        """Add an event of a finished run, in order, as if its training thread had emitted it at `now_s`."""
        if isinstance(event, events.CollectiveEvent) or (isinstance(event, events.WaitEvent) and event.num_started):
            # The flight recorder, which knows how long operations were under way, is gone with its process.
            self.metrics("torsh_collective_seconds", event.op).record(event.duration_s)
        if not self._is_replay and isinstance(event, events.PhaseEvent | events.WaitEvent):
            # The clock of that process, not of this one.
            self._training = TrainingSpans(event.start_s - _LONG_S)
            self._is_replay = True
        self._add(event, self._thread, now_s)
        self._finish_steps(None)

    def note_operations(self, num_flops: int, peak_flops: float | None) -> None:
        """A step takes so many operations on this rank, whose device does at most `peak_flops` a second."""
        self._flops_per_step, self._peak_flops = num_flops, peak_flops

    def note_averaged_group(self, group: str) -> None:
        """torch's DDP averages over this group, whose operations are recorded."""
        self._averaged_group = self._training.averaged_group = group

    def note_axes(self, axis_of: AxisOf) -> None:
        """Which groups lie along which axis of the mesh; asked on the reporter's thread."""
        self._axes.axis_of = axis_of

    def fold(self) -> None:
        """Add up everything that has happened since the last call, and record it as metrics."""
        self.fold_steps()
        dropped, self._num_dropped = self._num_dropped, 0
        if dropped:
            self.metrics("torsh_observe_dropped").record(dropped)
        self.settle()

    def fold_steps(self) -> None:
        """Add up the steps since the last call; their metrics wait for `settle`."""
        take = self._pending.popleft
        clock_s = time.time() - time.monotonic()
        for _ in range(len(self._pending)):
            entry = take()
            kind = type(entry)  # by how often they come
            if kind is OperationRecord:
                self._add_started(entry)
            elif kind is step_notes.StepNote:
                thread, end_s = entry.thread, entry.end_s
                if entry.optimizer_s is not None:
                    self._add_phase(thread, "optimizer", entry.optimizer_s, end_s, None)
                self._add_step(step_notes.step_event(entry, clock_s + end_s), thread, end_s, entry.end_cpu_s)
            elif kind is step_notes.WaitNote:
                self._add_wait(entry)
            elif kind is step_notes.PhaseNote:
                self._add_phase(*entry)
            else:
                self._add(*entry)
        self._finish_steps(self._run_delay.read(self._thread))
        self._look_at_recorder()

    def _add(self, event: events.Event, thread: int, now_s: float, cpu_s: float | None = None) -> None:
        match event:
            case events.WaitEvent(op=op, group=group, start_s=start_s):
                end_s, num_started = start_s + event.duration_s, event.num_started
                self._add_wait(
                    step_notes.WaitNote(thread, op, group, start_s, end_s, None, num_started, event.num_bytes)
                )
            case events.PhaseEvent(phase=phase, start_s=start_s):
                self._add_phase(thread, phase, start_s, start_s + event.duration_s, None)
            case events.StepEvent():
                self._add_step(event, thread, now_s, cpu_s)
            case events.CollectiveEvent():
                self._add_collective(event)
            case events.BucketEvent():
                self._compression.add(event)
                self.metrics("torsh_gradient_bytes").record(event.num_bytes)
                if event.wire_bytes is not None:
                    self.metrics("torsh_gradient_wire_bytes").record(event.wire_bytes)
            case events.MemoryEvent():
                self.metrics("torsh_device_memory_bytes").record(event.allocated_bytes)
                self.metrics("torsh_device_memory_peak_bytes").record(event.peak_bytes)
            case events.RoutingEvent():
                self._routing.add(event)
            case events.ParameterEvent():
                self._add_parameters(event)
            case _:
                self._add_mark(event)

    def _add_parameters(self, event: events.ParameterEvent) -> None:
        self.metrics("torsh_parameter_pushes" if event.operation == "push" else "torsh_parameter_pulls").record(1)
        self.metrics("torsh_parameter_version").record(event.version)
        self.metrics("torsh_parameter_bytes", event.operation).record(event.num_bytes)
        self.metrics("torsh_parameter_seconds", event.operation).record(event.duration_s)
        if event.staleness is not None:
            self.metrics("torsh_parameter_staleness").record(event.staleness)

    # Steps

    def _add_phase(self, thread: int, phase: str, start_s: float, end_s: float, cpu: step_notes.CpuSpan | None) -> None:
        if thread == self._thread:
            self._has_data = self._has_data or phase == "data"
            self._training.add_phase(phase, start_s, end_s, cpu)

    def _add_step(self, event: events.StepEvent, thread: int, now_s: float, cpu_s: float | None) -> None:
        if thread != self._thread:
            # Training runs in another thread than the main one: what was seen so far is not its time.
            self._thread = thread
            self._training = TrainingSpans(now_s - event.duration_s)
            self._training.averaged_group = self._averaged_group
        spans, computed_s = self._training.end_step(now_s, cpu_s)
        averaged_s, self._training.averaged_s = self._training.averaged_s, 0.0
        if averaged_s and self._training.averaged_group is not None:
            self._axes.add_wait(self._training.averaged_group, averaged_s)
        if not self._has_begun:
            # Nothing says when the first step began but the step itself, which does not count the wait for its data.
            self._has_begun = True
            spans.step_s = event.duration_s + spans.phases["data"]
            spans.phases["other"] = 0.0
            spans.phases["other"] = max(0.0, spans.step_s - sum(spans.phases.values()) - sum(spans.waits.values()))
        timeline, self._training.timeline = self._training.timeline, []
        if _roundness(event.step) >= self._roundness:
            self.timeline, self.timeline_step, self._roundness = timeline, event.step, _roundness(event.step)
        self._unfinished.append((event, spans, computed_s))

    def _finish_steps(self, delay_s: float | None) -> None:
        """Make the records of the steps since the last call, in which others had this thread's core for `delay_s`."""
        new, self._unfinished = self._unfinished, []
        if not new:
            return
        # What a thread did not compute, it slept, or somebody else had its core. The kernel says how much that was in
        # all, of the thread itself; the steps say when.
        waited = [sum(spans.waits.values()) for _, spans, _ in new]
        self._waited_s += sum(waited)
        absent = [
            _busy_s(spans, waited_s) - computed_s if computed_s is not None else 0.0
            for (_, spans, computed_s), waited_s in zip(new, waited, strict=True)
        ]
        total_s = sum([seconds for seconds in absent if seconds > 0])
        share = None if delay_s is None else min(1.0, delay_s / total_s) if total_s > 0 else 0.0
        for (event, spans, _), waited_s, absent_s in zip(new, waited, absent, strict=True):
            preempted_s = None if share is None else share * absent_s if absent_s > 0 else 0.0
            record = self._record_of(event, spans, waited_s, preempted_s)
            self.steps.append(record)
            self._window.append((record, event.num_tokens))
            self._new.append((event, record))

    def _record_of(
        self, event: events.StepEvent, spans: StepSpans, waited_s: float, preempted_s: float | None
    ) -> StepRecord:
        phases = spans.phases
        has_phases = "forward" in phases or "backward" in phases or "schedule" in phases
        return StepRecord(
            step=event.step,
            time=event.time,
            step_s=spans.step_s,
            forward_s=phases["forward"] + phases["stage"] if has_phases else None,
            backward_s=phases["backward"] if has_phases else None,
            optimizer_s=phases.get("optimizer"),
            wait_s=waited_s if self._has_waits else None,
            bubble_s=phases.get("schedule"),
            data_s=phases["data"] if self._has_data else None,
            other_s=phases["other"],
            loss=event.loss if event.loss is not None and math.isfinite(event.loss) else None,
            num_samples=event.num_samples,
            is_skipped=event.is_skipped,
            preempted_s=preempted_s,
            grad_norm=_short_float(event.grad_norm),
            learning_rate=_short_float(event.learning_rate),
        )

    def timeline_taken(self) -> None:
        """A summary has the timeline: the next step has another, however odd its number is."""
        self._roundness = -1

    def settle(self) -> None:
        """Record the steps and operations that were added since the last time: many at once cost less than each."""
        started, self._started = self._started, {}
        for op, (count, num_bytes) in started.items():
            self.metrics("torsh_collectives", op).record(count)
            self.metrics("torsh_collective_bytes", op).record(num_bytes)
        for rates in (self._axes, self._compression, self._routing):
            rates.settle()
        new, self._new = self._new, []
        if not new:
            return
        for name, values in (
            ("torsh_step", [event.step for event, _ in new]),
            ("torsh_steps", [1 for event, _ in new if not event.is_skipped]),
            ("torsh_epoch", [event.epoch for event, _ in new]),
            ("torsh_skipped_steps", [1 for event, _ in new if event.is_skipped]),
            ("torsh_last_step_timestamp_seconds", [event.time for event, _ in new]),
            ("torsh_loss", [event.loss for event, _ in new]),
            ("torsh_learning_rate", [event.learning_rate for event, _ in new]),
            ("torsh_gradient_norm", [event.grad_norm for event, _ in new]),
            ("torsh_loss_scale", [event.loss_scale for event, _ in new]),
            ("torsh_samples", [event.num_samples for event, _ in new]),
            ("torsh_tokens", [event.num_tokens for event, _ in new]),
            ("torsh_step_seconds", [record.step_s for _, record in new]),
            ("torsh_busy_seconds", [record.busy_s for _, record in new]),
            ("torsh_forward_seconds", [record.forward_s for _, record in new]),
            ("torsh_backward_seconds", [record.backward_s for _, record in new]),
            ("torsh_optimizer_seconds", [record.optimizer_s for _, record in new]),
            ("torsh_bubble_seconds", [record.bubble_s for _, record in new]),
            ("torsh_wait_seconds", [record.wait_s for _, record in new]),
            ("torsh_input_wait_seconds", [record.data_s for _, record in new]),
        ):
            known = [value for value in values if value is not None]
            if known:
                self.metrics(name).record_all(known)
        self._measure_rates()

    def _measure_rates(self) -> None:
        """Rates over the newest steps."""
        total_s = sum(record.step_s for record, _ in self._window)
        if total_s <= 0:
            return
        samples = [record.num_samples for record, _ in self._window if record.num_samples is not None]
        tokens = [num_tokens for _, num_tokens in self._window if num_tokens is not None]
        waits = [record.wait_s for record, _ in self._window if record.wait_s is not None]
        data = [record.data_s for record, _ in self._window if record.data_s is not None]
        for name, values in (
            ("torsh_samples_per_second", samples),
            ("torsh_tokens_per_second", tokens),
            ("torsh_wait_ratio", waits),
            ("torsh_input_wait_ratio", data),
        ):
            if len(values) == len(self._window):
                self.metrics(name).record(sum(values) / total_s)
        if self._flops_per_step is not None:
            rate = self._flops_per_step * len(self._window) / total_s
            self.metrics("torsh_flops_per_second").record(rate)
            if self._peak_flops is not None:
                self.metrics("torsh_mfu_ratio").record(rate / self._peak_flops)

    # Communication

    def _add_wait(self, note: step_notes.WaitNote) -> None:
        self._has_waits = True
        self._groups_with_waits.add(note.group)
        if note.num_started:
            self._count(note.op, note.group, note.num_started, note.num_bytes)
        if note.thread == self._thread:
            self._training.add_wait(note)
            self._axes.add_wait(note.group, note.end_s - note.start_s)

    def _add_started(self, operation: OperationRecord) -> None:
        self._has_waits = True
        self._groups_with_waits.add(operation.group)
        self._count(operation.op, operation.group, 1, operation.num_bytes)
        if operation.thread == self._thread:
            self._training.add_start(operation)

    def _add_collective(self, event: events.CollectiveEvent) -> None:
        if event.error is not None:
            self.metrics("torsh_collective_errors", event.op).record(1)
        if event.group not in self._groups_with_waits:  # else its backend has told of it already
            self._count(event.op, event.group, 1, event.num_bytes)

    def _count(self, op: str, group: str, num_operations: int, num_bytes: int) -> None:
        self._axes.count(group, num_operations, num_bytes)
        sums = self._started.setdefault(op, [0, 0])
        sums[0] += num_operations
        sums[1] += num_bytes

    def _look_at_recorder(self) -> None:
        """How long operations were under way, from the flight recorder: also those that nobody waited for."""
        since_s, self._looked_s = self._looked_s, time.monotonic()
        intervals = []
        ended: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
        by_group: list[tuple[str, int, float]] = []
        under_way, self._under_way = self._under_way, []
        newest, last = None, self._last_seen
        for record in itertools.chain(itertools.takewhile(lambda one: one is not last, recorder.timed()), under_way):
            newest = newest or record
            if record.end_s is None or record.end_s > self._looked_s:
                self._under_way.append(record)
                continue
            if record.end_s <= since_s:
                continue  # it ended before anybody looked
            start_s, end_s, op = record.start_s, record.end_s, record.op
            intervals.append((start_s if start_s > since_s else since_s, end_s))
            ended[op].append((record.num_bytes, end_s - start_s))
            by_group.append((record.group, record.num_bytes, end_s - start_s))
        self._last_seen = newest or last
        del self._under_way[_MAX_UNDER_WAY:]
        self._axes.add_ended(reversed(by_group))
        for op, found in ended.items():
            self.metrics("torsh_collective_seconds", op).record_all([took_s for _, took_s in found])
            moving_s = sum([took_s for num_bytes, took_s in found if num_bytes])
            if moving_s > 0:
                num_moved = sum([num_bytes for num_bytes, _ in found])
                self.metrics("torsh_collective_bytes_per_second", op).record(num_moved / moving_s)
        waited_s, self._waited_s = self._waited_s, 0.0
        under_way_s = covered_s(intervals)
        if under_way_s > 0 and self._has_waits:
            self.metrics("torsh_overlap_ratio").record(max(0.0, 1 - waited_s / under_way_s))

    # Rare events

    def _add_mark(self, event: events.Event) -> None:
        match event:
            case events.CheckpointEvent():
                self._add_checkpoint(event)
            case events.PressureEvent():
                self.metrics("torsh_memory_pressure", event.action).record(1)
            case events.CompileEvent():
                self.metrics("torsh_compile_seconds").record(event.duration_s)
            case events.EvaluationEvent():
                self.metrics("torsh_validation_loss").record(event.loss)
        self.marks.append(
            {
                name: value[:_MAX_TEXT_CHARS] if isinstance(value, str) else value
                for name, value in events.to_record(event).items()
                if value is None or isinstance(value, str | int | float | bool)
            }
        )

    def _add_checkpoint(self, event: events.CheckpointEvent) -> None:
        if event.error is not None:
            self.metrics("torsh_checkpoint_errors", event.action).record(1)
            return
        self.metrics("torsh_checkpoints", event.action).record(1)
        if event.duration_s is not None:
            self.metrics("torsh_checkpoint_seconds", event.action).record(event.duration_s)
        if event.action == "saved":
            self.metrics("torsh_checkpoint_step").record(event.step)
            if event.num_bytes is not None:
                self.metrics("torsh_checkpoint_size_bytes").record(event.num_bytes)


def _busy_s(spans: StepSpans, waited_s: float) -> float:
    """The time in which the thread waited for nobody and for no data."""
    phases = spans.phases
    return spans.step_s - waited_s - phases.get("data", 0.0) - phases.get("schedule", 0.0)


def _short_float(value: float | None) -> float | None:
    """What four bytes hold; None for what they do not, such as the norm of gradients that overflowed."""
    return value if value is not None and abs(value) < _LARGEST_SHORT else None


def _roundness(step: int) -> int:
    """How often two divides a number."""
    return (step & -step).bit_length()
