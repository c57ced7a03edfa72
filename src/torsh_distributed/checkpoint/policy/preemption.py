"""SIGTERM and SIGUSR1 before a job is taken off its node, and Ctrl-C: noted here, acted on after the step."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

EXIT_CODE = 75
"""EX_TEMPFAIL: the job was told to stop, has saved, and may be started again."""

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class PreemptionSignals:
    """Notes SIGTERM, SIGUSR1 and SIGINT while it is watching; the handlers from before are put back after.

    A second SIGINT goes to the handler from before: it ends a process that reaches no further step.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def watch(self) -> bool:
        """Start noting; False where Python allows no handlers, outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return False
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return True

    def stop(self) -> None:
        """Put the handlers from before back."""
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}

    @property
    def exit_code(self) -> int:
        """What to exit with once saved: as after Ctrl-C for SIGINT, else the code that asks to be started again."""
        return 128 + signal.SIGINT if self.received == signal.SIGINT else EXIT_CODE

    def _note(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(signal.Signals(number))
        if number == signal.SIGINT and self.received == signal.SIGINT and callable(before):
            before(number, frame)
        self.received = signal.Signals(number)
