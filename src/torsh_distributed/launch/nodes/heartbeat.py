"""The heartbeat between launchers: a regular call that is skipped after this process was suspended."""

from __future__ import annotations

import time

from torsh_distributed.launch.local.loop import Callback, Loop

_BEATS_PER_TIMEOUT = 10
_LATE_BEATS = 3.5
_MAX_INTERVAL_S = 1.0


class HeartbeatSender:
    """Calls `beat` several times per timeout.

    A late beat means that this process was suspended (stopped, swapped out, a laptop asleep). What others sent
    meanwhile is still unread, so that beat is skipped: it would report them as silent.
    """

    def __init__(self, loop: Loop, timeout_s: float, beat: Callback) -> None:
        self._loop = loop
        self._interval_s = min(_MAX_INTERVAL_S, timeout_s / _BEATS_PER_TIMEOUT)
        self.notice_s = _LATE_BEATS * self._interval_s
        """Silence after which something seems to be wrong with the other end, long before it counts as lost."""
        self._late_s = timeout_s / 2
        self._beat = beat
        self._last_s = time.monotonic()
        self._timer = loop.call_later(self._interval_s, self._fire)

    def _fire(self) -> None:
        now_s = time.monotonic()
        was_suspended = now_s - self._last_s > self._late_s
        self._last_s = now_s
        self._timer = self._loop.call_later(self._interval_s, self._fire)
        if not was_suspended:
            self._beat()

    def stop(self) -> None:
        """Stop calling."""
        self._timer.cancel()
