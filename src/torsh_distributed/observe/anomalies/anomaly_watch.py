"""Watches a job for seven kinds of anomalies; what it finds is kept, counted and shown."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from torsh_distributed.observe.anomalies.detectors import (
    Detector,
    LevelShiftDetector,
    SpikeDetector,
    SustainedDetector,
    TrendDetector,
)
from torsh_distributed.observe.job.job_view import MAX_RANKS, JobView
from torsh_distributed.observe.job.rank_view import ValueKey
from torsh_distributed.observe.metrics.step_record import StepRecord, share_of_steps

MAX_ANOMALIES = 200
_MAX_SERIES = 4096


class AnomalyKind(StrEnum):
    """What is unusual."""

    PERFORMANCE_SPIKE = "performance_spike"
    """One step took much longer than those before it."""
    PERFORMANCE_DEGRADATION = "performance_degradation"
    """Steps take longer than at first, and keep doing so."""
    MEMORY_LEAK = "memory_leak"
    """A rank's memory grows steadily."""
    COMMUNICATION_BOTTLENECK = "communication_bottleneck"
    """Every rank spends most of its step waiting for others."""
    GPU_UNDERUTILIZATION = "gpu_underutilization"
    """A GPU idles most of the time."""
    IO_BOTTLENECK = "io_bottleneck"
    """Ranks wait for their data."""
    LOAD_IMBALANCE = "load_imbalance"
    """Ranks compute for very different times."""


@dataclass(frozen=True, slots=True)
class Anomaly:
    """One episode that began."""

    kind: AnomalyKind
    severity: float
    """From 0 to 10."""
    message: str
    time: float
    rank: int | None = None
    step: int | None = None


MAKERS: dict[AnomalyKind, Callable[[], Detector]] = {
    AnomalyKind.PERFORMANCE_SPIKE: SpikeDetector,
    AnomalyKind.PERFORMANCE_DEGRADATION: LevelShiftDetector,
    AnomalyKind.MEMORY_LEAK: TrendDetector,
    AnomalyKind.COMMUNICATION_BOTTLENECK: lambda: SustainedDetector(0.5),
    AnomalyKind.GPU_UNDERUTILIZATION: lambda: SustainedDetector(0.6, is_above=False),
    AnomalyKind.IO_BOTTLENECK: lambda: SustainedDetector(0.2),
    AnomalyKind.LOAD_IMBALANCE: lambda: SustainedDetector(0.2),
}
"""The detector of each kind, and the limits: shares of a step for communication and data, of the time for a GPU, and
the variation (standard deviation over mean) of busy times for imbalance."""
_OF_STEPS = (
    (AnomalyKind.PERFORMANCE_SPIKE, ", far more than those before"),
    (AnomalyKind.PERFORMANCE_DEGRADATION, "; steps have become slower and stay so"),
)


class AnomalyWatch:
    """Attached to a JobView. `on_step` is called by it; call `tick` about once a second for what is not a step."""

    def __init__(self, view: JobView) -> None:
        self._view = view
        self._detectors: dict[tuple[AnomalyKind, str], Detector] = {}
        self._found: deque[Anomaly] = deque(maxlen=MAX_ANOMALIES)
        self._counts: Counter[str] = Counter()
        self._num_seen: dict[int, int] = {}
        self._first_rank = MAX_RANKS
        self._last_sequence: dict[int, int] = {}
        view.step_listeners.append(self.on_step)

    @property
    def found(self) -> list[Anomaly]:
        """The newest, oldest first."""
        return list(self._found)

    def to_rows(self) -> list[dict[str, Any]]:
        """JSON-ready."""
        return [asdict(anomaly) for anomaly in self._found]

    def values(self) -> dict[ValueKey, float]:
        """The counts, as metrics of the job."""
        return {("torsh_anomalies", (kind,)): float(count) for kind, count in self._counts.items()}

    def on_step(self, rank: int, step: StepRecord) -> None:
        """A rank has done a step; step times are the same on all ranks, so one of them is judged."""
        self._num_seen[rank] = self._num_seen.get(rank, 0) + 1
        if rank < self._first_rank:
            self._first_rank = rank
        if rank != self._first_rank or self._num_seen[rank] <= 2 or step.is_skipped:
            return  # the first steps allocate and compile
        for kind, rest in _OF_STEPS:
            severity = self._judged(kind, "", step.step_s)
            if severity is not None:
                told = f"step {step.step} took {step.step_s * 1e3:.1f} ms{rest}"
                self._note(kind, severity, told, step=step.step)

    def tick(self) -> None:
        """Judge what ranks told since the last tick."""
        with self._view.lock:
            heard = [view for view in self._view.ranks.values() if view.sequence != self._last_sequence.get(view.rank)]
            if not heard:
                return
            for view in heard:
                self._last_sequence[view.rank] = view.sequence
                for name in ("torsh_host_memory_bytes", "torsh_device_memory_bytes"):
                    value = view.number(name)
                    if value is None:
                        continue
                    severity = self._judged(AnomalyKind.MEMORY_LEAK, f"{name} {view.rank}", value)
                    if severity is not None:
                        what = "device memory" if "device" in name else "memory"
                        told = f"the {what} of rank {view.rank} grows steadily, to {value / 2**20:.0f} MB"
                        self._note(AnomalyKind.MEMORY_LEAK, severity, told, rank=view.rank)
                for (_, labels), gpu_use in view.values({"torsh_gpu_utilization_ratio"}):
                    if isinstance(gpu_use, float | int):
                        where = f"GPU {labels[0]} of {view.facts.get('node', 'a node')}"
                        told = f"{where} idles: it is busy {gpu_use:.0%} of the time"
                        self._judge(AnomalyKind.GPU_UNDERUTILIZATION, where, gpu_use, told)
            self._judge_shares()

    def _judge_shares(self) -> None:
        newest = [view.newest_steps(10) for view in self._view.ranks.values()]
        waits = [share_of_steps(steps, "wait_s") for steps in newest]
        known = [wait for wait in waits if wait is not None]
        if known and len(known) == len(waits):
            # If even the rank that waits least waits long, it is the network; else some rank is slow.
            told = f"every rank waits for the others for at least {min(known):.0%} of a step"
            self._judge(AnomalyKind.COMMUNICATION_BOTTLENECK, "", min(known), told)
        data = [share for steps in newest if (share := share_of_steps(steps, "data_s")) is not None]
        if data:
            told = f"a rank waits for its data for {max(data):.0%} of a step"
            self._judge(AnomalyKind.IO_BOTTLENECK, "", max(data), told)
        busy = [
            sum([step.busy_s for step in steps]) / len(steps)
            for steps in newest
            if steps and steps[-1].wait_s is not None
        ]
        mean = sum(busy) / len(busy) if busy else 0.0
        if len(busy) > 1 and mean > 0:
            # Not `statistics.pstdev`, which computes in fractions.
            variation = math.sqrt(sum([(one - mean) ** 2 for one in busy]) / len(busy)) / mean
            told = f"ranks compute between {min(busy) * 1e3:.1f} and {max(busy) * 1e3:.1f} ms a step"
            self._judge(AnomalyKind.LOAD_IMBALANCE, "", variation, told)

    def _judge(self, kind: AnomalyKind, series: str, value: float, message: str) -> None:
        severity = self._judged(kind, series, value)
        if severity is not None:
            self._note(kind, severity, message)

    def _judged(self, kind: AnomalyKind, series: str, value: float) -> float | None:
        """How severe it is that a series has this value now; None if it is not unusual."""
        detector = self._detectors.get((kind, series))
        if detector is None:
            if len(self._detectors) >= _MAX_SERIES:
                return None
            detector = self._detectors[kind, series] = MAKERS[kind]()
        return detector.add(value)

    def _note(
        self, kind: AnomalyKind, severity: float, message: str, *, rank: int | None = None, step: int | None = None
    ) -> None:
        self._counts[kind.value] += 1
        self._found.append(Anomaly(kind, severity, message, time.time(), rank, step))
