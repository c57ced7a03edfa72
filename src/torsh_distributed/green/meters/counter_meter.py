"""One counter of energy, read at intervals: what it has grown by, or why that is not to be believed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torsh_distributed.observe.metrics.energy_counters import EnergyCounter


@dataclass(frozen=True, slots=True)
class DeviceState:
    """What a device tells beside its energy; None for what it does not."""

    utilization: float | None = None
    """Share of time in which it computed, from 0 to 1."""
    celsius: float | None = None
    num_others: int = 0
    """Processes of other jobs that compute on it."""
    own_share: float | None = None
    """This job's part of the computing time beside them."""


_UNKNOWN = DeviceState()


@dataclass(frozen=True, slots=True)
class MeterReading:
    """What a meter has counted since its last reading."""

    meter: str
    source: str
    is_measured: bool
    joules: float
    duration_s: float
    ranks: tuple[int, ...] = ()
    detail: str | None = None
    state: DeviceState = _UNKNOWN


class CounterMeter:
    """Differences of a counter. One that starts over, goes back or jumps is said to, and that interval counts zero."""

    def __init__(
        self,
        counter: EnergyCounter,
        ranks: tuple[int, ...],
        *,
        now_s: float,
        remark: str | None = None,
        read_state: Callable[[], DeviceState] | None = None,
    ) -> None:
        """`remark` is what must be known about the numbers. Raises OSError if the counter cannot be read."""
        self.counter = counter
        self._read_state = read_state
        self._remark = remark
        self.ranks = ranks
        self._last_j = counter.read_j()
        self._last_s = now_s

    def read(self, now_s: float) -> MeterReading:
        """The growth since the last reading; raises OSError if the counter does not answer."""
        counter = self.counter
        total_j, duration_s = counter.read_j(), now_s - self._last_s
        grown_j, detail = total_j - self._last_j, None
        remark, self._remark = self._remark, None
        self._last_j, self._last_s = total_j, now_s
        if grown_j < 0 and counter.range_j is not None:
            grown_j += counter.range_j
        most_j = counter.max_w * max(duration_s, 0.2)
        if grown_j < 0:
            detail = f"the counter went back by {-grown_j:.0f} J: its driver was loaded again; this interval counts 0 J"
        elif grown_j > most_j:
            detail = (
                f"the counter grew by {grown_j:.3g} J in {duration_s:.1f} s, more than {counter.max_w:.0f} W allow; "
                "this interval counts 0 J"
            )
        joules = grown_j if detail is None else 0.0
        state = _UNKNOWN if self._read_state is None else self._read_state()
        return MeterReading(counter.name, counter.source, True, joules, duration_s, self.ranks, detail or remark, state)
