"""A ceiling on bytes per second: the token bucket."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from torsh_distributed.comm.recording.span_account import covered_s
from torsh_distributed.errors import InvalidArgument

_MAX_TRANSFERS = 1000


class BandwidthMonitor:
    """Bytes per second over the transfers that ended in the last `window_s` seconds; at most 1,000 are kept.

    Time in which transfers overlap counts once, so concurrency shows as bandwidth. Idle time does not count: the
    figure says what the link gives, not how much is asked of it.
    """

    def __init__(self, window_s: float = 10.0, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._window_s = window_s
        self._clock = clock
        self._transfers: deque[tuple[float, float, int]] = deque(maxlen=_MAX_TRANSFERS)
        self._lock = threading.Lock()

    def add(self, num_bytes: int, start_s: float, end_s: float) -> None:
        """Note a transfer by its times on the monotonic clock. Empty ones say nothing about bandwidth."""
        if num_bytes > 0 and end_s > start_s:
            with self._lock:
                self._transfers.append((start_s, end_s, num_bytes))

    def measured(self) -> float | None:
        """Bytes per second in the window; None if nothing travelled in it."""
        oldest_s = self._clock() - self._window_s
        with self._lock:
            recent = [transfer for transfer in self._transfers if transfer[1] >= oldest_s]
        if not recent:
            return None
        times = [(start_s, end_s) for start_s, end_s, _ in recent]
        return sum(size for *_, size in recent) / covered_s(times)


_BURST_S = 0.05


class TokenBucket:
    """Tokens are bytes; they flow in at `bytes_per_s` and at most `burst_bytes` are kept.

    A transfer that fits in the bucket waits for its tokens. A larger one waits for a full bucket and leaves a debt, for
    which later ones wait. So by time t at most `burst_bytes + bytes_per_s * t` were taken, plus the debt of the last.
    Not thread-safe: its owner holds a lock.
    """

    def __init__(
        self, bytes_per_s: float, burst_bytes: float | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if bytes_per_s <= 0 or (burst_bytes is not None and burst_bytes <= 0):
            raise InvalidArgument(
                "a rate limit and its burst must be above zero",
                hint="use None for no limit",
                bytes_per_s=bytes_per_s,
                burst_bytes=burst_bytes,
            )
        self.bytes_per_s = bytes_per_s
        self.burst_bytes = bytes_per_s * _BURST_S if burst_bytes is None else burst_bytes
        self._clock = clock
        self._tokens = self.burst_bytes
        self._filled_s = clock()

    def delay_s(self, num_bytes: int) -> float:
        """Seconds until `take(num_bytes)` is allowed; 0.0 if it is allowed now."""
        self._fill()
        missing = min(num_bytes, self.burst_bytes) - self._tokens
        return max(0.0, missing / self.bytes_per_s)

    def take(self, num_bytes: int) -> None:
        """Spend tokens; the caller has waited for `delay_s` to be 0."""
        self._fill()
        self._tokens -= num_bytes

    def _fill(self) -> None:
        now_s = self._clock()
        self._tokens = min(self.burst_bytes, self._tokens + (now_s - self._filled_s) * self.bytes_per_s)
        self._filled_s = now_s
