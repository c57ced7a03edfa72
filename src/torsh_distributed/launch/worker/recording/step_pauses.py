"""Pauses between steps that the launcher asks for, so that the node takes less power. They change no number."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from torsh_distributed import events
from torsh_distributed.launch.worker.launcher_line import GREEN_VARIABLE, LauncherLine, open_line

_MOST_S = 60.0


class StepPauses:
    """After each step its thread pauses a multiple of the time since the last pause; a new word ends the pause."""

    def __init__(self, line: LauncherLine) -> None:
        self._share = 0.0
        self._resumed_s = time.monotonic()
        self._news = threading.Event()
        self.paused_s = 0.0
        line.listen("pace", self._hear)
        events.subscribe(self._pause, events.StepEvent)

    def _hear(self, message: dict[str, Any]) -> None:
        share = message.get("pause_share")
        if isinstance(share, int | float) and share >= 0:
            self._share = float(share)
            self._news.set()

    def _pause(self, event: events.Event) -> None:
        """On the training thread, after the update."""
        now_s = time.monotonic()
        if self._share > 0:
            self._news.clear()
            self._news.wait(min(_MOST_S, self._share * (now_s - self._resumed_s)))
            self.paused_s += time.monotonic() - now_s
        self._resumed_s = time.monotonic()


# By process: a forked child is not the rank.
_pauses: dict[int, StepPauses] = {}


def pause_as_asked() -> None:
    """Listen for the launcher's word, once per process, where it reads the node's meters."""
    line = open_line() if GREEN_VARIABLE in os.environ and os.getpid() not in _pauses else None
    if line is not None:
        _pauses.clear()
        _pauses[os.getpid()] = StepPauses(line)
