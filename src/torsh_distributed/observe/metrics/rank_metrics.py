"""The metrics of this process: recording a value costs an append, adding up happens on the reporter's thread."""

from __future__ import annotations

import math
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.observe.metrics.catalogue import (
    BUCKETS_S,
    CATALOGUE,
    CUSTOM_PREFIX,
    MetricDefinition,
    MetricKind,
)
from torsh_distributed.observe.metrics.sample_ring import SampleRing, SampleStatistics

MAX_CUSTOM_METRICS = 200
MAX_LABEL_SETS = 64
_MAX_PENDING = 1024
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,99}")
_MAX_HELP_CHARS = 300

LabelValues = tuple[str, ...]


class Metric:
    """Values of one metric under one set of label values. `record` may be called from any thread."""

    def __init__(self, definition: MetricDefinition, label_values: LabelValues = ()) -> None:
        self.definition = definition
        self.label_values = label_values
        self._pending: deque[float] = deque()
        self._lock = threading.Lock()
        self._value: float | None = None
        self._num_nonfinite = 0
        self._ring = SampleRing(BUCKETS_S)

    def record(self, value: float) -> None:
        """A counter grows by `value`, a gauge takes it, a distribution adds it. NaN and infinity are counted apart."""
        # An append alone, which is atomic: folding under a lock would cost the training thread ten times as much.
        self._pending.append(value)
        if len(self._pending) >= _MAX_PENDING:
            self.fold()

    def record_all(self, values: Iterable[float]) -> None:
        """The same for several values, from the reporter's thread."""
        self._pending.extend(values)
        self.fold()

    def fold(self) -> None:
        """Add up what was recorded; the reporter does this before every summary."""
        with self._lock:
            # The deque stays: another thread may be about to append to it.
            take = self._pending.popleft
            given = [take() for _ in range(len(self._pending))]
            values = _finite_numbers(given)
            self._num_nonfinite += len(given) - len(values)
            if not values:
                return
            if self.definition.kind is MetricKind.COUNTER:
                self._value = (self._value or 0.0) + sum(value for value in values if value > 0)
            else:
                self._value = values[-1]
                self._ring.extend(values, is_counted=self.definition.kind is MetricKind.DISTRIBUTION)

    @property
    def value(self) -> float | None:
        """A counter's total, else the newest finite value; None before the first."""
        self.fold()
        return self._value

    @property
    def num_nonfinite(self) -> int:
        """Values that were no finite number."""
        return self._num_nonfinite

    def statistics(self) -> SampleStatistics | None:
        """Mean, spread and percentiles of the newest values; None without any, and for a counter."""
        self.fold()
        with self._lock:
            return self._ring.statistics()

    def summary(self) -> Any:
        """JSON-ready: a number, or for a distribution its count, sum, buckets and statistics."""
        if self.definition.kind is not MetricKind.DISTRIBUTION:
            return self.value
        found = self.statistics()
        if found is None:
            return None
        figures = (found.mean, found.std, found.low, found.median, found.p95, found.p99, found.high)
        with self._lock:
            return {
                "n": self._ring.count,
                "sum": self._ring.total,
                "buckets": list(self._ring.bucket_counts),
                "last": self._value,
                "stats": [float(f"{figure:.6g}") for figure in figures],
            }


def _finite_numbers(given: list[Any]) -> list[float]:
    """Those that are finite numbers, as floats."""
    try:
        values = [float(value) for value in given]
    except (TypeError, ValueError, OverflowError):
        values = [_number(value) for value in given]
    # A finite sum has no other addends: nearly always one test is enough.
    return values if math.isfinite(sum(values)) else [value for value in values if math.isfinite(value)]


def _number(given: object) -> float:
    """What was recorded, as a float; NaN for what is not a number."""
    try:
        return float(given)  # type: ignore[arg-type]  # whatever the user gave
    except (TypeError, ValueError, OverflowError):
        return math.nan


class RankMetrics:
    """The metrics of one rank, by name and label values. Memory is bounded: further label sets share one, `other`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._metrics: dict[tuple[str, LabelValues], Metric] = {}
        self._custom: dict[str, MetricDefinition] = {}
        self._num_label_sets: dict[str, int] = {}

    def __call__(self, name: str, *label_values: str) -> Metric:
        """A metric of the catalogue, or a custom one that was defined."""
        metric = self._metrics.get((name, label_values))
        return metric if metric is not None else self._make(name, label_values)

    def _make(self, name: str, label_values: LabelValues) -> Metric:
        definition = CATALOGUE.get(name) or self._custom[name]
        if len(label_values) != len(definition.labels):
            raise InvalidArgument(
                f"{name} has the labels {list(definition.labels)}", hint="give one value for each", got=label_values
            )
        with self._lock:
            if self._num_label_sets.get(name, 0) >= MAX_LABEL_SETS:
                label_values = ("other",) * len(label_values)
            key = (name, label_values)
            if key not in self._metrics:
                self._num_label_sets[name] = self._num_label_sets.get(name, 0) + 1
                self._metrics[key] = Metric(definition, label_values)
            return self._metrics[key]

    def custom(self, name: str, *, kind: str = "gauge", unit: str = "", help: str = "") -> Metric:
        """A metric of the user's, defined at its first use; exported as `torsh_custom_<name>`."""
        full_name = CUSTOM_PREFIX + name
        known = self._metrics.get((full_name, ()))
        if known is not None:
            return known
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidArgument(
                "a metric's name has letters, digits and _, and does not begin with a digit",
                hint="use a name such as eval_accuracy",
                name=str(name)[:100],
            )
        if kind not in set(MetricKind):
            raise InvalidArgument(f"kind must be one of {', '.join(MetricKind)}", kind=kind)
        with self._lock:
            if len(self._custom) >= MAX_CUSTOM_METRICS and full_name not in self._custom:
                raise InvalidArgument(
                    f"a process has at most {MAX_CUSTOM_METRICS} custom metrics",
                    hint="a name must not contain a step or an id: make it a value",
                    name=name,
                )
            self._custom.setdefault(
                full_name,
                MetricDefinition(full_name, MetricKind(kind), unit[:30], help[:_MAX_HELP_CHARS] or name, "custom"),
            )
        return self(full_name)

    def summary(self) -> list[list[Any]]:
        """`[name, label values, summary]` for every metric that has a value."""
        with self._lock:
            metrics = list(self._metrics.values())
        rows = []
        for metric in metrics:
            row = metric.summary()
            if row is not None:
                rows.append([metric.definition.name, list(metric.label_values), row])
            if metric.num_nonfinite:
                rows.append(["torsh_nonfinite_values", [metric.definition.name], metric.num_nonfinite])
        return rows

    def definitions(self) -> list[list[str]]:
        """`[name, kind, unit, help]` of every custom metric."""
        with self._lock:
            return [[one.name, one.kind.value, one.unit, one.help] for one in self._custom.values()]

    def values(self) -> Mapping[str, float | None]:
        """The newest value of every metric, labels in braces, for a look from Python."""
        with self._lock:
            metrics = list(self._metrics.values())
        return {shown_name(metric.definition, metric.label_values): metric.value for metric in metrics}


def shown_name(definition: MetricDefinition, label_values: LabelValues) -> str:
    """`name{label="value"}` as Prometheus writes it."""
    if not label_values:
        return definition.name
    pairs = ",".join(f'{label}="{value}"' for label, value in zip(definition.labels, label_values, strict=True))
    return f"{definition.name}{{{pairs}}}"


Send = Callable[[dict[str, Any]], bool]
"""Sends a message to whoever shows it; whether it was taken. Never blocks for long, never raises."""
