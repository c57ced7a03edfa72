"""Times the averaging of buckets, and how much of it overlaps with backward."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torsh_distributed import events
from torsh_distributed.comm.measurement import NetworkProfiler
from torsh_distributed.comm.recording.span_account import covered_s
from torsh_distributed.comm.shared_memory.buffers import shares_memory
from torsh_distributed.plan import DdpConfig

_LATENCY_SHARE = 0.1
_LEAST_MB, _MOST_MB = 1.0, 50.0


def auto_bucket(config: DdpConfig | None = None, *, group: dist.ProcessGroup, device: torch.device) -> DdpConfig:
    """`config` with both bucket sizes chosen by the measured link; every rank of the group calls this.

    `device` is where gradients are: a group may have a backend for each kind of device.

    All ranks choose the same, by the slowest of them. Sizes do not change in a group of one, where nothing is sent, nor
    where ranks share memory: there is no link to keep busy, and every bucket costs a synchronization.
    """
    chosen = config or DdpConfig()
    if group.size() == 1 or shares_memory(group):
        return chosen
    network = NetworkProfiler(group, device=device).measure()
    largest_mb = bucket_size_mb(latency_s=network.latency_s, byte_s=network.byte_s)
    sized = chosen.replace(max_bucket_size_mb=largest_mb, min_bucket_size_mb=max(0.5, largest_mb / 10), auto_size=False)
    events.emit(
        events.DecisionEvent(
            subject="bucket size",
            choice=f"{largest_mb:.1f} MB, first {sized.min_bucket_size_mb:.1f} MB",
            reason=f"an all-reduce takes {network.latency_s * 1e6:.0f} us and {network.byte_s * 1e9:.2f} ns a byte:"
            f" the former is {_LATENCY_SHARE:.0%} of a bucket's time",
        )
    )
    return sized


def bucket_size_mb(*, latency_s: float, byte_s: float) -> float:
    """The smallest bucket whose bytes take ten times as long as its latency, within 1 to 50 MB.

    Smaller buckets overlap sooner, larger ones pay latency less often.
    """
    return min(_MOST_MB, max(_LEAST_MB, latency_s / byte_s / _LATENCY_SHARE / 2**20))


@dataclass(frozen=True, kw_only=True)
class OverlapStats:
    """How much of the communication of gradients overlapped with backward, as measured on this rank."""

    num_steps: int
    comm_s: float
    """Seconds during which gradients were being sent; overlapping buckets count once."""

    hidden_s: float
    """The part of it before the last gradient of its step was ready, while backward was computing."""

    @property
    def exposed_s(self) -> float:
        """The part that training waited for."""
        return self.comm_s - self.hidden_s

    @property
    def hidden_share(self) -> float | None:
        """The hidden share of all communication; None if there was none."""
        return self.hidden_s / self.comm_s if self.comm_s else None


class BucketClock:
    """Records when the averaging of each bucket starts and ends.

    `add` runs on the threads that send buckets, the rest on the training thread; a list's append is atomic.
    """

    def __init__(self) -> None:
        self.step = 0
        self._intervals: list[tuple[float, float]] = []
        self._ready: float | None = None
        self._comm_s = 0.0
        self._hidden_s = 0.0
        self._num_steps = 0
        self._taken_s = 0.0

    def add(self, index: int, num_bytes: int, start: float, *, codec: str | None, wire_bytes: int | None) -> None:
        """Record a bucket whose averaging began at `start`, on the monotonic clock, and ends now."""
        end = time.monotonic()
        self._intervals.append((start, end))
        if events.wanted(events.BucketEvent):
            events.emit(
                events.BucketEvent(
                    step=self.step,
                    index=index,
                    num_bytes=num_bytes,
                    duration_s=end - start,
                    codec=codec,
                    wire_bytes=wire_bytes,
                )
            )

    def note_ready(self) -> None:
        """The last gradient of the step is ready: from here on, training waits for communication."""
        self._ready = time.monotonic()

    def end_step(self) -> None:
        """All buckets of the step are averaged."""
        intervals, self._intervals = self._intervals, []
        if not intervals:
            return
        ready, self._ready = self._ready, None
        self._comm_s += covered_s(intervals)
        if ready is not None:
            self._hidden_s += covered_s(_before(intervals, ready))
        self._num_steps += 1

    def take_s(self) -> float:
        """Seconds spent sending gradients since the last call; starts a new step."""
        self.end_step()
        new_s, self._taken_s = self._comm_s - self._taken_s, self._comm_s
        self.step += 1
        return new_s

    def overlap(self) -> OverlapStats:
        """Totals since construction."""
        return OverlapStats(num_steps=self._num_steps, comm_s=self._comm_s, hidden_s=self._hidden_s)


def _before(intervals: Iterable[tuple[float, float]], moment: float) -> list[tuple[float, float]]:
    return [(start, min(end, moment)) for start, end in intervals if start < moment]
