"""Statistics of communication by operation and by peer, fed by events, in bounded memory.

Durations are kept as counts in buckets that grow by two percent. So percentiles cover the whole history, are within one
percent of the exact ones, and those of several ranks merge without loss, in at most about 1,600 numbers.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Self

from torsh_distributed import events

_ACCURACY = 0.01
_GROWTH = (1 + _ACCURACY) / (1 - _ACCURACY)
_LOG_GROWTH = math.log(_GROWTH)
_SHORTEST_S = 1e-9
_LONGEST_S = 1e5


class DurationSketch:
    """Durations as counts by bucket, from a nanosecond to a day; what lies outside counts at the edge."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, duration_s: float) -> None:
        """Count a duration."""
        clamped_s = min(max(duration_s, _SHORTEST_S), _LONGEST_S)
        self._counts[math.ceil(math.log(clamped_s) / _LOG_GROWTH)] += 1

    def percentile_s(self, percent: float) -> float | None:
        """The duration that `percent` of all do not exceed, within one percent; None if nothing was counted."""
        total = self._counts.total()
        if total == 0:
            return None
        remaining = max(1, math.ceil(total * percent / 100))
        for bucket in sorted(self._counts):
            remaining -= self._counts[bucket]
            if remaining <= 0:
                return 2 * _GROWTH**bucket / (1 + _GROWTH)
        raise AssertionError("the counts add up to their total")

    def merge(self, other: DurationSketch) -> None:
        """Add the other's counts."""
        self._counts.update(other._counts)

    def to_dict(self) -> dict[str, int]:
        """The counts by bucket, JSON-ready."""
        return {str(bucket): count for bucket, count in sorted(self._counts.items())}

    @classmethod
    def from_dict(cls, record: Mapping[str, int]) -> Self:
        """What `to_dict` gave."""
        sketch = cls()
        sketch._counts.update({int(bucket): count for bucket, count in record.items()})
        return sketch


class OperationStats:
    """The operations of one kind, or with one peer: how many, how large, how long, how they failed.

    Durations and bytes are those of the successes: an operation that failed moved an unknown part of its bytes.
    """

    def __init__(self) -> None:
        self.num_successes = 0
        self.errors: Counter[str] = Counter()
        """Failures by kind of error."""
        self.num_bytes = 0
        self.total_s = 0.0
        self.min_s: float | None = None
        self.max_s: float | None = None
        self.peak_bytes_per_s: float | None = None
        """The best bandwidth of a single operation."""
        self.last_time: float | None = None
        """Wall-clock time of the newest one."""
        self._durations = DurationSketch()

    def record(self, event: events.CollectiveEvent) -> None:
        """Count an operation."""
        self.last_time = _largest(self.last_time, event.time)
        if event.error is not None:
            self.errors[event.error.partition(":")[0]] += 1
            return
        self.num_successes += 1
        self.num_bytes += event.num_bytes
        self.total_s += event.duration_s
        self.min_s = event.duration_s if self.min_s is None else min(self.min_s, event.duration_s)
        self.max_s = _largest(self.max_s, event.duration_s)
        self._durations.add(event.duration_s)
        if event.num_bytes and event.duration_s > 0:
            self.peak_bytes_per_s = _largest(self.peak_bytes_per_s, event.num_bytes / event.duration_s)

    @property
    def count(self) -> int:
        """Successes and failures."""
        return self.num_successes + self.num_errors

    @property
    def num_errors(self) -> int:
        """Failures of any kind."""
        return self.errors.total()

    @property
    def mean_s(self) -> float | None:
        """Mean duration of a success."""
        return self.total_s / self.num_successes if self.num_successes else None

    @property
    def p50_s(self) -> float | None:
        """Median duration, within one percent."""
        return self._percentile_s(50)

    @property
    def p95_s(self) -> float | None:
        """The duration that 95 % do not exceed, within one percent."""
        return self._percentile_s(95)

    @property
    def p99_s(self) -> float | None:
        """The duration that 99 % do not exceed, within one percent."""
        return self._percentile_s(99)

    def _percentile_s(self, percent: float) -> float | None:
        found_s = self._durations.percentile_s(percent)
        if found_s is None or self.min_s is None or self.max_s is None:
            return None
        return min(max(found_s, self.min_s), self.max_s)

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes over the time of the operations that moved them."""
        return self.num_bytes / self.total_s if self.num_bytes and self.total_s > 0 else None

    def merge(self, other: OperationStats) -> None:
        """Add the other's counts, as if all had been recorded here."""
        self.num_successes += other.num_successes
        self.errors.update(other.errors)
        self.num_bytes += other.num_bytes
        self.total_s += other.total_s
        if other.min_s is not None:
            self.min_s = other.min_s if self.min_s is None else min(self.min_s, other.min_s)
        self.max_s = _largest(self.max_s, other.max_s)
        self.peak_bytes_per_s = _largest(self.peak_bytes_per_s, other.peak_bytes_per_s)
        self.last_time = _largest(self.last_time, other.last_time)
        self._durations.merge(other._durations)

    def to_dict(self) -> dict[str, Any]:
        """All figures, JSON-ready; `durations` holds what `from_dict` needs for exact merging."""
        return {
            "count": self.count,
            "num_successes": self.num_successes,
            "num_errors": self.num_errors,
            "errors": dict(self.errors),
            "num_bytes": self.num_bytes,
            "total_s": self.total_s,
            "min_s": self.min_s,
            "max_s": self.max_s,
            "mean_s": self.mean_s,
            "p50_s": self.p50_s,
            "p95_s": self.p95_s,
            "p99_s": self.p99_s,
            "bytes_per_s": self.bytes_per_s,
            "peak_bytes_per_s": self.peak_bytes_per_s,
            "last_time": self.last_time,
            "durations": self._durations.to_dict(),
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """What `to_dict` gave."""
        stats = cls()
        for name in ("num_successes", "num_bytes", "total_s", "min_s", "max_s", "peak_bytes_per_s", "last_time"):
            setattr(stats, name, record[name])
        stats.errors.update(record["errors"])
        stats._durations = DurationSketch.from_dict(record["durations"])
        return stats


class CommunicationStats:
    """Every operation of this process since `attach`, by kind and by peer. Thread-safe.

    `with CommunicationStats() as stats:` counts what happens inside. Memory is bounded: one `OperationStats` for each
    kind of operation and for each rank that messages were exchanged with.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._detach: Callable[[], None] | None = None
        self._by_op: dict[str, OperationStats] = {}
        self._by_peer: dict[int, OperationStats] = {}
        self._since = time.time()

    def attach(self) -> Self:
        """Count every operation from now on, until `detach`."""
        with self._lock:
            if self._detach is None:
                self._detach = events.subscribe(self._take, events.CollectiveEvent)
        return self

    def detach(self) -> None:
        """Stop counting; the counts stay. A second call does nothing."""
        with self._lock:
            detach, self._detach = self._detach, None
        if detach is not None:
            detach()

    def __enter__(self) -> Self:
        return self.attach()

    def __exit__(self, *_: object) -> None:
        self.detach()

    def _take(self, event: events.Event) -> None:
        assert isinstance(event, events.CollectiveEvent)
        self.record(event)

    def record(self, event: events.CollectiveEvent) -> None:
        """Count one operation; `attach` does this for all operations."""
        with self._lock:
            self._by_op.setdefault(event.op, OperationStats()).record(event)
            if event.peer is not None:
                self._by_peer.setdefault(event.peer, OperationStats()).record(event)

    @property
    def by_op(self) -> dict[str, OperationStats]:
        """A copy of the figures of each kind of operation."""
        with self._lock:
            return {op: _copy(stats) for op, stats in sorted(self._by_op.items())}

    @property
    def by_peer(self) -> dict[int, OperationStats]:
        """A copy of the figures of the messages to and from each rank."""
        with self._lock:
            return {peer: _copy(stats) for peer, stats in sorted(self._by_peer.items())}

    @property
    def total(self) -> OperationStats:
        """All operations together."""
        whole = OperationStats()
        for stats in self.by_op.values():
            whole.merge(stats)
        return whole

    @property
    def since(self) -> float:
        """Wall-clock time since which operations are counted: creation, or the last `reset`."""
        return self._since

    def merge(self, other: CommunicationStats) -> None:
        """Add the counts of another, such as another rank's."""
        by_op, by_peer = other.by_op, other.by_peer
        with self._lock:
            self._since = min(self._since, other.since)
            for op, stats in by_op.items():
                self._by_op.setdefault(op, OperationStats()).merge(stats)
            for peer, stats in by_peer.items():
                self._by_peer.setdefault(peer, OperationStats()).merge(stats)

    def reset(self) -> None:
        """Forget everything and count from now."""
        with self._lock:
            self._by_op.clear()
            self._by_peer.clear()
            self._since = time.time()

    def to_dict(self) -> dict[str, Any]:
        """All figures, JSON-ready."""
        return {
            "since": self.since,
            "by_op": {op: stats.to_dict() for op, stats in self.by_op.items()},
            "by_peer": {str(peer): stats.to_dict() for peer, stats in self.by_peer.items()},
        }

    def to_json(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """What `to_dict` gave, on this rank or another."""
        stats = cls()
        stats._since = record["since"]
        stats._by_op = {op: OperationStats.from_dict(figures) for op, figures in record["by_op"].items()}
        stats._by_peer = {int(peer): OperationStats.from_dict(figures) for peer, figures in record["by_peer"].items()}
        return stats


def _copy(stats: OperationStats) -> OperationStats:
    copy = OperationStats()
    copy.merge(stats)
    return copy


def _largest(one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return other if one is None else one
    return max(one, other)
