"""The launcher's end of a worker's line: questions to the worker, its messages to the launcher.

Whatever arrives was written by the user's program: it is parsed as JSON of a bounded size, never unpickled, and what
is not understood is dropped.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torsh_distributed.comm.transport.packets import receive_packet
from torsh_distributed.launch.local.loop import Loop
from torsh_distributed.launch.worker.launcher_line import MAX_MESSAGE_BYTES

_STATES = {
    "T": "it is stopped (SIGSTOP or a debugger)",
    "t": "it is stopped by a debugger",
    "D": "it is in uninterruptible sleep: a disk or network file system does not answer",
    "Z": "it has ended",
    "R": "it computes in native code that holds Python's lock",
}
_OTHER_STATE = "it waits in native code that holds Python's lock"


class WorkerLine:
    """One worker's line, driven by the loop. `on_message` gets every message that is a JSON object."""

    def __init__(self, loop: Loop, on_message: Callable[[dict[str, Any]], None]) -> None:
        self._loop = loop
        self._on_message = on_message
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        self._is_open = True
        self.is_answered = False
        """Whether the worker has opened its end."""
        loop.watch(self._ours.fileno(), self._take_one)

    @property
    def worker_fd(self) -> int:
        """The descriptor that the worker inherits."""
        return self._theirs.fileno()

    def close_worker_end(self) -> None:
        """Once the worker runs, its end is the worker's alone."""
        self._theirs.close()

    def ask(self) -> bool:
        """Ask the worker what it does; whether the question was sent."""
        return self.tell({"type": "ask"})

    def tell(self, message: dict[str, Any]) -> bool:
        """Send a message to the worker; whether it was sent."""
        return self.tell_encoded(json.dumps(message).encode())

    def tell_encoded(self, data: bytes) -> bool:
        """`tell` a message that many workers get."""
        try:
            self._ours.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            return False
        return self._is_open

    def drain(self) -> None:
        """Take every message that has arrived; called before a worker's exit is judged."""
        while self._is_open and self._take():
            pass

    def _take_one(self) -> None:
        """Take one message, no more: one worker must not keep the launcher from the others."""
        self._take()

    def _take(self) -> bool:
        """Take the next message; whether there was one."""
        try:
            data = receive_packet(self._ours, MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._stop()
            return False
        message = _parse(data)
        if message is not None:
            self.is_answered = True
            self._on_message(message)
        return True

    def _stop(self) -> None:
        if self._is_open:
            self._is_open = False
            self._loop.unwatch(self._ours.fileno())

    def close(self) -> None:
        """Close both ends."""
        self._stop()
        self._ours.close()
        self._theirs.close()


def _parse(data: bytes) -> dict[str, Any] | None:
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) and isinstance(message.get("type"), str) else None


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped and so cannot answer."""
    return _state_of(pid) in ("T", "t")


def why_silent(pid: int) -> str:
    """Why a process does not answer, from its state in /proc."""
    state = _state_of(pid)
    return "it has ended" if state is None else f"it does not answer: {_STATES.get(state, _OTHER_STATE)}"


def _state_of(pid: int) -> str | None:
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return None
    return "T" if state in ("R", "S") and _has_stopped_thread(pid) else state


def _has_stopped_thread(pid: int) -> bool:
    try:
        threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208
        states = [Path(f"/proc/{pid}/task/{each}/stat").read_bytes().rpartition(b")")[2].split()[0] for each in threads]
    except (OSError, IndexError):
        return False
    return b"T" in states
