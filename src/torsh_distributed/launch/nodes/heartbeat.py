"""The heartbeat between launchers: a regular sign of life, and a look at whether the others gave theirs."""

from __future__ import annotations

import threading
import time

from torsh_distributed.launch.local.loop import Callback, Loop

_BEATS_PER_TIMEOUT = 10
_LATE_BEATS = 3.5
_MAX_INTERVAL_S = 1.0
_STUCK_S = 30.0
"""A loop that does not turn for so long hangs; any shorter, it is busy with an import or waits for processes to end."""


class HeartbeatSender:
    """Calls `send` on a thread of its own, and `check` in the loop, several times per timeout.

    Why a thread: the loop may be busy for a second where the machine is, and the others must not take that for death.
    A late check means that this process was busy or suspended (stopped, swapped out, a laptop asleep). What others sent
    meanwhile is still unread, so that check is skipped: it would report them as silent.
    """

    def __init__(self, loop: Loop, timeout_s: float, *, send: Callback, check: Callback) -> None:
        """`send` must be safe to call beside the loop."""
        self._loop = loop
        self._interval_s = min(_MAX_INTERVAL_S, timeout_s / _BEATS_PER_TIMEOUT)
        self.notice_s = _LATE_BEATS * self._interval_s
        """Silence after which something seems to be wrong with the other end, long before it counts as lost."""
        self._late_s = timeout_s / 2
        self._send = send
        self._check = check
        self._turned_s = time.monotonic()
        self._timer = loop.call_later(self._interval_s, self._turn)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="torsh-heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._is_over.wait(self._interval_s):
            if time.monotonic() - self._turned_s < _STUCK_S:
                self._send()

    def _turn(self) -> None:
        now_s = time.monotonic()
        was_late = now_s - self._turned_s > self._late_s
        self._turned_s = now_s
        self._timer = self._loop.call_later(self._interval_s, self._turn)
        if not was_late:
            self._check()

    def stop(self) -> None:
        """Stop calling."""
        self._timer.cancel()
        self._is_over.set()
        self._thread.join()
