"""The process that observes a job, and the launcher's handle on it.

Over its standard input, a Unix socket that only the launcher has the other end of, it receives the settings, then one
packet for each message; end of file ends it. Messages are sent without waiting: what the socket does not take, because
all ranks spoke at once, is kept and goes first the next time. Beyond a bound messages are dropped and counted, so the
launcher never waits for whoever looks.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from torsh_distributed.comm.transport.packets import receive_packet
from torsh_distributed.observe.settings import ObserveSettings

_MAX_MESSAGE_BYTES = 1 << 17
_SEND_BUFFER_BYTES = 1 << 22
_MAX_WAITING_BYTES = 1 << 25
_CLOSE_TIMEOUT_S = 20.0


class ObserverProcess:
    """Started beside a launcher, or beside a rank without one. `reports` is readable when it has something to say."""

    def __init__(self, settings: ObserveSettings) -> None:
        self.reports, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.num_dropped = 0
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._is_open = True
        with theirs:
            for end in (self.reports, theirs):
                with contextlib.suppress(OSError):  # the system's limit is enough
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            # A session of its own: Ctrl-C is for the workers, and the report is written after them.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "torsh_distributed.observe.serving.observer_process"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.send(settings.to_dict())

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def send(self, message: Mapping[str, Any]) -> bool:
        """Pass a message on, now or when there is room; whether it was taken."""
        data = json.dumps(message, default=str).encode()
        is_too_much = len(data) > _MAX_MESSAGE_BYTES or self._waiting_bytes + len(data) > _MAX_WAITING_BYTES
        if not self._is_open or is_too_much:
            self.num_dropped += 1
            return False
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        return self._send_waiting(socket.MSG_DONTWAIT)

    def _send_waiting(self, flags: int) -> bool:
        """Send what waits, as far as the socket takes it; False if nobody is there any more, and all of it is lost."""
        while self._waiting:
            try:
                self.reports.send(self._waiting[0], flags | socket.MSG_NOSIGNAL)
            except (BlockingIOError, TimeoutError):
                return True
            except OSError:  # it has ended; what it said last is still to be read
                self.num_dropped += len(self._waiting)
                self._waiting.clear()
                self._waiting_bytes = 0
                return False
            self._waiting_bytes -= len(self._waiting.popleft())
        return True

    def take_reports(self) -> list[tuple[str, str]]:
        """What it says: (`said` or `warned`, text). Empty with `is_over` once it has ended."""
        found = []
        while self._is_open:
            try:
                data = receive_packet(self.reports, _MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self._is_open = False
                break
            kind, _, text = data.decode(errors="replace").partition(" ")
            found.append((kind, text))
        return found

    @property
    def is_over(self) -> bool:
        """Whether it has closed its end."""
        return not self._is_open

    def finish(self, tell: Callable[[str, str], None], *, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """The job has ended: wait until the report is written, pass on what it says, and end it."""
        deadline = time.monotonic() + timeout_s
        self.reports.settimeout(timeout_s)
        self._send_waiting(0)
        with contextlib.suppress(OSError):  # it has ended already
            self.reports.shutdown(socket.SHUT_WR)
        try:
            while self._is_open and (left_s := deadline - time.monotonic()) > 0:
                self.reports.settimeout(left_s)
                try:
                    data = receive_packet(self.reports, _MAX_MESSAGE_BYTES)
                except OSError:
                    break
                if not data:
                    break
                kind, _, text = data.decode(errors="replace").partition(" ")
                tell(kind, text)
        finally:
            self.close()

    def close(self) -> None:
        """End it now."""
        self._is_open = False
        self.reports.close()
        if self._process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=1.0)
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()


def main() -> None:
    """In the process: observe until the launcher is done or gone."""
    # Whoever ends the job ends this by closing the socket; signals to the job are for the workers.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Training comes first where cores are scarce: a rank that computes is not interrupted when a summary arrives.
    with contextlib.suppress(OSError):
        os.nice(5)
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    from torsh_distributed.observe.serving.observer import Observer

    control = socket.socket(fileno=os.dup(0))

    def tell(kind: str, text: str) -> None:
        with contextlib.suppress(OSError):  # the launcher is gone
            control.send(f"{kind} {text}".encode()[:4096], socket.MSG_NOSIGNAL)

    first = receive_packet(control, _MAX_MESSAGE_BYTES)
    if not first:
        return
    observer = Observer(ObserveSettings.from_dict(json.loads(first)), tell)
    events_dir = os.environ.get("TORSH_EVENTS_DIR")
    if events_dir:
        from torsh_distributed.events import JsonlSink

        JsonlSink(events_dir)  # closed at exit; alerts go there
    observer.start()
    while data := receive_packet(control, _MAX_MESSAGE_BYTES):
        try:
            message = json.loads(data)
        except (ValueError, RecursionError):
            message = {}
        observer.take(message if isinstance(message, dict) else {})
    observer.close()


if __name__ == "__main__":
    main()
