"""Collects the events of the Engine and the groups while training runs, for the efficiency report."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from contextlib import ExitStack
from dataclasses import asdict
from typing import Self

import torch.distributed as dist

from torsh_distributed import events
from torsh_distributed.comm.backends.lifecycle import GroupLifecycle
from torsh_distributed.comm.collectives.objects import all_gather_object
from torsh_distributed.comm.recording.native_waits import timed_native_groups
from torsh_distributed.comm.recording.span_account import PART_OF_PHASE, SpanAccount
from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument
from torsh_distributed.events import Phase
from torsh_distributed.parallel.mesh.group_axes import GroupAxes
from torsh_distributed.parallel.mesh.layout import MeshLayout
from torsh_distributed.train.efficiency.report import AxisTime, EfficiencyReport, StepTimes
from torsh_distributed.train.engine import Engine


class Account:
    """The sums over steps, by part and by axis of the mesh; `SpanAccount` divides each step."""

    def __init__(self, started: float) -> None:
        self.num_steps = 0
        self._spans = SpanAccount(started, bubble_waits={"pp"})
        self._total = 0.0
        self._parts: defaultdict[str, float] = defaultdict(float)
        self._waits: defaultdict[str, float] = defaultdict(float)
        self._operations: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def count(self, axis: str, *, num_operations: int, num_bytes: int) -> None:
        """Count operations started by a group along an axis, in any thread."""
        self._operations[axis] += num_operations
        self._bytes[axis] += num_bytes

    def add_phase(self, phase: Phase, start: float, duration: float) -> None:
        """Add a phase of a step that the thread has finished."""
        self._spans.add_phase(phase, start, duration)

    def add_wait(self, axis: str, start: float, duration: float) -> None:
        """Add the time the thread was blocked by an operation along an axis."""
        self._spans.add_wait(axis, start, duration)

    def end_step(self, now: float) -> None:
        """End a step: all time since the previous one, or since the start, belongs to it."""
        step = self._spans.end_step(now)
        for phase, seconds in step.phases.items():
            self._parts[PART_OF_PHASE[phase]] += seconds
        for axis, seconds in step.waits.items():
            self._waits[axis] += seconds
        self._total += step.step_s
        self.num_steps += 1

    def times(self, axes: tuple[str, ...]) -> StepTimes:
        """The mean step; `axes` come first, used or not."""
        per = 1 / self.num_steps
        found = [*axes, *(axis for axis in sorted({*self._operations, *self._waits}) if axis not in axes)]
        return StepTimes(
            step_s=self._total * per,
            compute_s=self._parts["compute"] * per,
            bubble_s=self._parts["bubble"] * per,
            optimizer_s=self._parts["optimizer"] * per,
            data_s=self._parts["data"] * per,
            other_s=self._parts["other"] * per,
            axes={
                axis: AxisTime(
                    num_operations=self._operations[axis] * per,
                    num_bytes=self._bytes[axis] * per,
                    wait_s=self._waits[axis] * per,
                )
                for axis in found
            },
        )


class EfficiencyMeter:
    """Measures the steps of an Engine: `with EfficiencyMeter(engine) as meter:`, steps, then `meter.report()`.

    Use it in the training thread, on every rank. The process groups themselves time what a rank waits for, so the
    communication of torch's DDP, FSDP2, DTensor and pipelines counts too; without a meter that costs nothing. On
    torch's own backends, such as gloo, what Python starts and waits for is timed while the meter runs. For models on
    the CPU: of a GPU the host does not see when operations end.
    """

    def __init__(self, engine: Engine) -> None:
        device = next(engine.unwrapped.parameters()).device
        if device.type != "cpu":
            raise FeatureNotAvailable(
                f"the host's clock cannot tell where the time of a model on {device} goes",
                hint="use torch.profiler there, or look at the plan on the CPU",
                feature="efficiency report",
            )
        self._layout = MeshLayout(engine.plan.mesh)
        self._account: Account | None = None
        self._lock = threading.Lock()
        self._axis_of = GroupAxes(self._layout)
        self._thread = 0
        self._measuring = ExitStack()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Measure from here on, discarding earlier measurements."""
        self.stop()
        self._thread = threading.get_ident()
        self._account = Account(time.monotonic())
        self._measuring.callback(events.subscribe(self._take, events.PhaseEvent, events.WaitEvent, events.StepEvent))
        if not isinstance(dist.group.WORLD, GroupLifecycle):
            self._measuring.enter_context(timed_native_groups())

    def stop(self) -> None:
        """Stop measuring; a step in progress is not counted."""
        self._measuring.close()

    def report(self) -> EfficiencyReport:
        """The report on the steps so far; every rank calls this, between two steps."""
        account = self._account
        if account is None or account.num_steps == 0:
            raise InvalidArgument(
                "no step was measured", hint="with EfficiencyMeter(engine) as meter: engine.step(batch)"
            )
        with self._lock:
            mine = account.times(self._layout.used_axes)
        return EfficiencyReport(
            num_steps=account.num_steps,
            equation=self._layout.config.equation,
            ranks=tuple(StepTimes.from_dict(times) for times in all_gather_object(asdict(mine))),
        )

    def _take(self, event: events.Event) -> None:
        """Called in the thread of the event; only waits of the training thread count as time."""
        account = self._account
        assert account is not None, "start() makes it"
        is_training = threading.get_ident() == self._thread
        with self._lock:
            if isinstance(event, events.WaitEvent):
                axis = self._axis_of(event.group)
                if axis is None:
                    return
                account.count(axis, num_operations=event.num_started, num_bytes=event.num_bytes)
                if is_training:
                    account.add_wait(axis, event.start_s, event.duration_s)
            elif isinstance(event, events.PhaseEvent) and is_training:
                account.add_phase(event.phase, event.start_s, event.duration_s)
            elif isinstance(event, events.StepEvent) and is_training:
                account.end_step(time.monotonic())
