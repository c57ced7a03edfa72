"""The heartbeat between launchers: a regular call that does not blame others for one's own sleep."""

from __future__ import annotations

import time

from torsh_distributed.launch.local.loop import Callback, Loop

_BEATS_PER_TIMEOUT = 5
_MAX_INTERVAL_S = 1.0


class Pulse:
    """Calls `beat` several times per timeout.

    A beat that comes late means that this process itself was held up (stopped, swapped out, a laptop asleep):
    what others sent meanwhile is still unread, so that one beat is left out rather than call them silent.
    """

    def __init__(self, loop: Loop, timeout_s: float, beat: Callback) -> None:
        self._loop = loop
        self._interval_s = min(_MAX_INTERVAL_S, timeout_s / _BEATS_PER_TIMEOUT)
        self._late_s = timeout_s / 2
        self._beat = beat
        self._last_s = time.monotonic()
        self._timer = loop.call_later(self._interval_s, self._fire)

    def _fire(self) -> None:
        now_s = time.monotonic()
        was_held_up = now_s - self._last_s > self._late_s
        self._last_s = now_s
        self._timer = self._loop.call_later(self._interval_s, self._fire)
        if not was_held_up:
            self._beat()

    def stop(self) -> None:
        """No more beats."""
        self._timer.cancel()
