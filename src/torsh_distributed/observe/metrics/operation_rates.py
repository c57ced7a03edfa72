"""What repeats many times a step, as latency, throughput and trend: along an axis, through a codec, by a gate.

Everything here runs on the reporter's thread, from events and records that exist anyway.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable

from torsh_distributed import events
from torsh_distributed.observe.metrics.rank_metrics import RankMetrics

_WINDOW = 200
_LEAST_FOR_TREND = 20

AxisOf = Callable[[str], str | None]
"""The axis of the mesh, or several, along which the ranks of a group differ; None for a group that has none."""


class RateWindow:
    """Amounts, and the seconds that they took, of the newest operations."""

    def __init__(self, size: int = _WINDOW) -> None:
        self._newest: deque[tuple[float, float]] = deque(maxlen=size)

    def add(self, amount: float, seconds: float) -> None:
        """One operation."""
        self._newest.append((amount, seconds))

    @property
    def rate(self) -> float | None:
        """Amount per second of it; None without any time."""
        return _rate(self._newest)

    @property
    def trend(self) -> float | None:
        """The rate of the newer half over that of the older half, minus 1; None for few operations."""
        rows = list(self._newest)
        if len(rows) < _LEAST_FOR_TREND:
            return None
        older, newer = _rate(rows[: len(rows) // 2]), _rate(rows[len(rows) // 2 :])
        return newer / older - 1 if newer is not None and older else None


def _rate(rows: Iterable[tuple[float, float]]) -> float | None:
    amounts, seconds = 0.0, 0.0
    for amount, took_s in rows:
        amounts, seconds = amounts + amount, seconds + took_s
    return amounts / seconds if seconds > 0 else None


class CompressionRates:
    """How fast gradients are averaged through each codec, and how much smaller they travel."""

    def __init__(self, metrics: RankMetrics) -> None:
        self._metrics = metrics
        self._windows: defaultdict[str, RateWindow] = defaultdict(RateWindow)
        self._sizes: defaultdict[str, RateWindow] = defaultdict(RateWindow)
        self._changed: set[str] = set()

    def add(self, event: events.BucketEvent) -> None:
        """A bucket was averaged, through a codec or without."""
        if event.codec is None:
            return
        # Without its number: adaptive compression changes that all the time.
        codec = event.codec.partition(":")[0]
        self._changed.add(codec)
        self._windows[codec].add(event.num_bytes, event.duration_s)
        self._metrics("torsh_compression_seconds", codec).record(event.duration_s)
        if event.wire_bytes is not None:
            self._sizes[codec].add(event.wire_bytes, event.num_bytes)

    def settle(self) -> None:
        """Record the rates, if they have changed."""
        for codec in self._changed:
            window = self._windows[codec]
            _record(self._metrics, "torsh_compression_bytes_per_second", window.rate, codec)
            _record(self._metrics, "torsh_compression_trend_ratio", window.trend, codec)
            _record(self._metrics, "torsh_compression_size_ratio", self._sizes[codec].rate, codec)
        self._changed.clear()


class RoutingRates:
    """How fast gates decide, and whether the load of experts becomes more or less even."""

    def __init__(self, metrics: RankMetrics) -> None:
        self._metrics = metrics
        self._tokens = RateWindow()
        self._variations = RateWindow()
        self._has_changed = False

    def add(self, event: events.RoutingEvent) -> None:
        """A layer routed a batch."""
        metrics = self._metrics
        self._has_changed = True
        self._variations.add(event.load_variation, 1.0)
        metrics("torsh_expert_load_variation_ratio").record(event.load_variation)
        metrics("torsh_expert_dropped").record(event.num_dropped)
        metrics("torsh_expert_choices").record(event.num_routed)
        metrics("torsh_routed_tokens").record(event.num_tokens)
        _record(metrics, "torsh_expert_capacity_use_ratio", event.capacity_use)
        if event.duration_s is not None:
            self._tokens.add(event.num_tokens, event.duration_s)
            metrics("torsh_routing_seconds").record(event.duration_s)

    def settle(self) -> None:
        """Record the rates, if they have changed."""
        if self._has_changed:
            _record(self._metrics, "torsh_expert_load_trend_ratio", self._variations.trend)
            _record(self._metrics, "torsh_routing_tokens_per_second", self._tokens.rate)
            _record(self._metrics, "torsh_routing_trend_ratio", self._tokens.trend)
        self._has_changed = False


class _AxisSums:
    """What is known of an axis since the last time."""

    __slots__ = ("num_bytes", "num_operations", "times_s", "wait_s")

    def __init__(self) -> None:
        self.num_operations = 0
        self.num_bytes = 0
        self.wait_s = 0.0
        self.times_s: list[float] = []


class AxisRates:
    """What the groups along each axis of the mesh cost this rank, once it is known which groups those are."""

    def __init__(self, metrics: RankMetrics) -> None:
        self._metrics = metrics
        self._windows: defaultdict[str, RateWindow] = defaultdict(RateWindow)
        self._new: defaultdict[str, _AxisSums] = defaultdict(_AxisSums)
        self.axis_of: AxisOf | None = None

    def count(self, group: str, num_operations: int, num_bytes: int) -> None:
        """Operations of a group were started."""
        axis = None if self.axis_of is None else self.axis_of(group)
        if axis is not None:
            sums = self._new[axis]
            sums.num_operations += num_operations
            sums.num_bytes += num_bytes

    def add_wait(self, group: str, seconds: float) -> None:
        """The training thread waited for a group."""
        axis = None if self.axis_of is None else self.axis_of(group)
        if axis is not None:
            self._new[axis].wait_s += seconds

    def add_ended(self, ended: Iterable[tuple[str, int, float]]) -> None:
        """Operations have ended: group, bytes and seconds of each, oldest first."""
        if self.axis_of is None:
            return
        for group, num_bytes, took_s in ended:
            axis = self.axis_of(group)
            if axis is not None:
                self._new[axis].times_s.append(took_s)
                if num_bytes:
                    self._windows[axis].add(num_bytes, took_s)

    def settle(self) -> None:
        """Record what is new: a sum for each axis costs less than a value for each operation."""
        new, self._new = self._new, defaultdict(_AxisSums)
        for axis, sums in new.items():
            self._metrics("torsh_axis_operations", axis).record(sums.num_operations)
            self._metrics("torsh_axis_bytes", axis).record(sums.num_bytes)
            self._metrics("torsh_axis_wait_seconds", axis).record(sums.wait_s)
            if sums.times_s:
                self._metrics("torsh_axis_seconds", axis).record_all(sums.times_s)
                _record(self._metrics, "torsh_axis_bytes_per_second", self._windows[axis].rate, axis)
                _record(self._metrics, "torsh_axis_trend_ratio", self._windows[axis].trend, axis)


def _record(metrics: RankMetrics, name: str, value: float | None, *labels: str) -> None:
    if value is not None:
        metrics(name, *labels).record(value)
