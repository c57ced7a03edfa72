"""What is known of one rank: its newest values and steps, from summaries that its process sent.

A summary was written by the user's program. It is checked piece by piece; what is not understood is dropped, and
everything kept is bounded.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torsh_distributed.observe.metrics.catalogue import (
    BUCKETS_S,
    CATALOGUE,
    CUSTOM_PREFIX,
    MetricDefinition,
    MetricKind,
)
from torsh_distributed.observe.metrics.rank_collector import MAX_STEPS_A_SUMMARY
from torsh_distributed.observe.metrics.rank_metrics import MAX_CUSTOM_METRICS, MAX_LABEL_SETS
from torsh_distributed.observe.metrics.step_record import MAX_TIMELINE_SPANS, StepRecord, unpack_steps

STEPS_KEPT = 200
SPLIT_STEPS_KEPT = 20
_MAX_LABEL_CHARS = 100
_MAX_TEXT_CHARS = 400
_MAX_FACTS = 40
_MAX_ROWS = 4000
_FLOATS = frozenset((float,))
_WHOLE = frozenset((int,))
_CUSTOM_NAME = re.compile(re.escape(CUSTOM_PREFIX) + r"[a-zA-Z_][a-zA-Z0-9_]{0,99}")

ValueKey = tuple[str, tuple[str, ...]]
"""A metric's name and its label values."""


@dataclass(frozen=True, slots=True)
class DistributionSummary:
    """A distribution as it arrived: totals of all values, statistics of the newest."""

    count: int
    total: float
    buckets: tuple[int, ...]
    """Counts by bucket of BUCKETS_S, not cumulative; the last is above all."""
    last: float
    mean: float
    std: float
    low: float
    median: float
    p95: float
    p99: float
    high: float


Value = float | DistributionSummary


_TIMELINES_KEPT = 4


@dataclass
class RankView:
    """One rank as last heard of."""

    rank: int
    heard_s: float = 0.0
    """Monotonic clock of the observer at the last summary."""
    time: float = 0.0
    clock: float = 0.0
    """Wall clock minus monotonic clock, of the rank's process."""
    sequence: int = 0
    _given: dict[ValueKey, Any] = field(default_factory=dict)
    _checked: dict[ValueKey, Value | None] = field(default_factory=dict)
    custom: dict[str, MetricDefinition] = field(default_factory=dict)
    steps: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=STEPS_KEPT))
    split_steps: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=SPLIT_STEPS_KEPT))
    """Those of the steps whose forward and backward were looked at."""
    timeline: list[tuple[str, float, float]] = field(default_factory=list)
    """The spans of the newest step that has any: name, start on the wall clock, seconds."""
    timeline_step: int = 0
    timelines: dict[int, list[tuple[str, float, float]]] = field(default_factory=dict)
    """Those of the newest summaries, by step."""
    facts: dict[str, Any] = field(default_factory=dict)
    num_bad: int = 0
    """Pieces of summaries that were not understood."""

    def number(self, name: str, *labels: str) -> float | None:
        """The newest value of a metric; of a distribution, the newest sample."""
        value = self.value((name, labels))
        return value.last if isinstance(value, DistributionSummary) else value

    def take(self, packet: Mapping[str, Any], *, now_s: float) -> list[StepRecord]:
        """Take a summary; returns its new steps."""
        self.heard_s = now_s
        self.time = finite(packet.get("time")) or self.time
        self.clock = finite(packet.get("clock")) or 0.0
        sequence = packet.get("sequence")
        self.sequence = sequence if isinstance(sequence, int) else self.sequence
        self._take_custom(packet.get("custom"))
        self._take_values(packet.get("metrics"))
        self._take_facts(packet.get("facts"))
        self._take_timeline(packet.get("timeline"), packet.get("timeline_step"))
        found, num_bad = unpack_steps(packet.get("steps"), most=MAX_STEPS_A_SUMMARY)
        self.num_bad += num_bad
        self.steps.extend(found)
        self.split_steps.extend([step for step in found if step.forward_s is not None])
        return found

    def _take_custom(self, rows: Any) -> None:
        for row in _rows(rows)[:MAX_CUSTOM_METRICS]:
            if (
                isinstance(row, list)
                and len(row) == 4
                and all(isinstance(text, str) for text in row)
                and _CUSTOM_NAME.fullmatch(row[0])
                and row[1] in set(MetricKind)
            ):
                name, kind, unit, text = row
                known = MetricDefinition(name, MetricKind(kind), unit[:30], text[:_MAX_TEXT_CHARS], "custom")
                if name in self.custom or len(self.custom) < MAX_CUSTOM_METRICS:
                    self.custom[name] = known
            else:
                self.num_bad += 1

    def _take_values(self, rows: Any) -> None:
        """Keep the values as they came; each is checked when it is first asked for, and most never are."""
        found: dict[ValueKey, Any] = {}
        for row in _rows(rows)[:_MAX_ROWS]:
            if type(row) is list and len(row) == 3 and type(row[0]) is str and type(row[1]) is list:
                name, labels, value = row
                found[name, tuple(map(str, labels)) if labels else ()] = value
            else:
                self.num_bad += 1
        if found:
            self._given = found
            self._checked = {}

    def newest_steps(self, most: int) -> list[StepRecord]:
        """The latest steps, oldest first."""
        return newest_of(self.steps, most)

    def names(self) -> list[ValueKey]:
        """Every metric that the last summary names, known or not."""
        return list(self._given)

    def value(self, key: ValueKey) -> Value | None:
        """The newest value; None if there is none, or if what came is no such value."""
        if key in self._checked:
            return self._checked[key]
        name, labels = key
        definition = CATALOGUE.get(name) or self.custom.get(name)
        value = None
        if key in self._given and definition is not None and len(labels) == len(definition.labels):
            value = _parse(definition, self._given[key])
        if value is None and key in self._given:
            self.num_bad += 1
        if len(self._checked) < _MAX_ROWS:
            self._checked[key] = value
        return value

    def values(self, names: Container[str] | None = None) -> Iterator[tuple[ValueKey, Value]]:
        """Every value that is understood, or those of the metrics in `names`; of each at most so many label sets."""
        sizes: dict[str, int] = {}
        checked = self._checked
        for key in self._given if names is None else [key for key in self._given if key[0] in names]:
            value = checked[key] if key in checked else self.value(key)
            sizes[key[0]] = sizes.get(key[0], 0) + 1
            if value is not None and sizes[key[0]] <= MAX_LABEL_SETS + 1:
                yield (key[0], tuple([label[:_MAX_LABEL_CHARS] for label in key[1]])), value

    def _take_facts(self, facts: Any) -> None:
        if isinstance(facts, Mapping):
            kept = list(facts.items())[:_MAX_FACTS]
            self.facts = {
                str(name)[:60]: value[:_MAX_TEXT_CHARS] if isinstance(value, str) else value
                for name, value in kept
                if isinstance(value, str | int | bool) or finite(value) is not None or _is_small(value)
            }

    def _take_timeline(self, rows: Any, step: Any) -> None:
        spans = []
        for row in _rows(rows)[:MAX_TIMELINE_SPANS]:
            if isinstance(row, list) and len(row) == 3 and isinstance(row[0], str):
                start, seconds = finite(row[1]), finite(row[2])
                if start is not None and seconds is not None:
                    spans.append((row[0][:60], start + self.clock, seconds))
        if spans:
            self.timeline, self.timeline_step = spans, step if isinstance(step, int) else 0
            self.timelines[self.timeline_step] = spans
            while len(self.timelines) > _TIMELINES_KEPT:
                del self.timelines[next(iter(self.timelines))]


def newest_of(steps: deque[StepRecord], most: int) -> list[StepRecord]:
    """The latest of them, oldest first, without a copy of all."""
    return [steps[at] for at in range(-min(most, len(steps)), 0)]


def _parse(definition: MetricDefinition, value: Any) -> Value | None:
    if definition.kind is not MetricKind.DISTRIBUTION:
        return finite(value)
    if not isinstance(value, Mapping):
        return None
    stats, buckets = _rows(value.get("stats")), _rows(value.get("buckets"))
    if not _FLOATS.issuperset(map(type, stats)):  # whole numbers, or none at all
        stats = [finite(figure) for figure in stats]
    count, total, last = value.get("n"), finite(value.get("sum")), finite(value.get("last"))
    if (
        not isinstance(count, int)
        or total is None
        or last is None
        or len(stats) != 7
        or not _FLOATS.issuperset(map(type, stats))
        or not math.isfinite(sum(stats))
        or len(buckets) != len(BUCKETS_S) + 1
        or not _WHOLE.issuperset(map(type, buckets))
        or min(buckets) < 0
    ):
        return None
    return DistributionSummary(count, total, tuple(buckets), last, *stats)


def _rows(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def finite(value: Any) -> float | None:
    """A number of another process, if it is one: JSON of Python's has NaN and infinity, which a browser cannot read."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # JSON has integers of any size
        return None
    return number if math.isfinite(number) else None


def _is_small(value: Any) -> bool:
    """A flat mapping of texts to numbers, such as the degrees of a mesh."""
    return (
        isinstance(value, dict)
        and len(value) <= 16
        and all(isinstance(key, str) and len(key) <= 30 and isinstance(item, int) for key, item in value.items())
    )
