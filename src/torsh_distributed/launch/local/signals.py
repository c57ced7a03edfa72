"""Signals as readable bytes, so the loop handles them like any other event."""

from __future__ import annotations

import signal
import socket
import threading
from types import FrameType
from typing import Any, Self

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end the job."""
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals for the workers only; batch systems send them before a time limit."""

SCALING = {signal.SIGTTIN: 1, signal.SIGTTOU: -1}
"""Signals to an elastic job: one worker more, one fewer."""


class SignalInbox:
    """While open, signals to this process are queued in `fd` instead of interrupting it.

    Python delivers signals to the main thread alone; opened elsewhere the inbox stays empty. A signal
    that was ignored from the start (nohup) stays ignored. Signals that scale are taken if `can_scale`.
    """

    def __init__(self, *, can_scale: bool = False) -> None:
        self._taken = (*ENDING, *PASSED_ON, *(SCALING if can_scale else ()))
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self._previous: dict[signal.Signals, Any] = {}
        self._previous_fd = -1
        self._is_open = threading.current_thread() is threading.main_thread()
        if not self._is_open:
            return
        self._previous_fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        for number in self._taken:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, _noted_by_wakeup_fd)

    @property
    def fd(self) -> int:
        """Readable while signals are queued."""
        return self._read.fileno()

    def take(self) -> list[signal.Signals]:
        """The signals that came since the last call, in order."""
        try:
            data = self._read.recv(4096)
        except BlockingIOError:
            return []
        return [signal.Signals(number) for number in data if number in self._taken]

    def close(self) -> None:
        """Restore the handlers from before."""
        if self._is_open:
            for number, handler in self._previous.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._previous_fd)
            self._is_open = False
        self._read.close()
        self._write.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _noted_by_wakeup_fd(number: int, frame: FrameType | None) -> None:
    """A handler must exist for the wakeup descriptor to be written; the byte there is what counts."""
