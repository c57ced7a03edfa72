"""The worker's line to its launcher: what a rank says about itself, on a path that needs neither store nor backend.

The line is one end of a socket pair that the worker inherits, named by TORSH_LINE_FD: nobody else can reach it. A
message is one packet of at most 64 KiB: a JSON object whose `type` says what it is. The kernel keeps packets whole, so
a rank that dies while it speaks leaves no half message. Unknown types are ignored on both sides. Loaded by path before
the user's script (see `worker_start`), so it imports only the standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from torsh_distributed.launch.worker.raised_error import describe_error, without_start
from torsh_distributed.launch.worker.waiting_operations import OperationWatch

FD_VARIABLE = "TORSH_LINE_FD"
METRICS_VARIABLE = "TORSH_METRICS"
"""Set if the launcher wants to know what its workers measure, to the seconds between readings of the node."""
GREEN_VARIABLE = "TORSH_GREEN"
"""Set if the launcher reads the meters of the node."""
BEAT_VARIABLE = "TORSH_BEAT_S"
"""Seconds between the beats that the launcher expects; without it there are none."""
MEMBER_VARIABLE = "TORSH_MEMBER"
"""In an elastic job: the worker's number, which it keeps while ranks change."""
JOIN_VARIABLE = "TORSH_JOINS"
"""Set for a worker that enters a world that trains already."""
NEWS_VARIABLE = "TORSH_NEWS_TIMEOUT_S"
"""In an elastic job: how long a failed collective waits for word from the launcher."""
MAX_MESSAGE_BYTES = 1 << 16
_SEND_TIMEOUT_S = 1.0
_MAX_UNHANDLED = 15


class LauncherLine:
    """The worker's end. `send` from any thread; a thread of its own answers the launcher and looks for long waits."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._pid = os.getpid()
        self._watch = OperationWatch()
        self._beat_s = float(os.environ.get(BEAT_VARIABLE) or 0)
        # A worker whose place is fixed beats from its first group on: imports and loading may hold Python's lock.
        self._beats = MEMBER_VARIABLE in os.environ
        self._handlers: dict[str, Callable[[dict[str, Any]], None]] = {}
        self._unhandled: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._serve, name="torsh-line", daemon=True)
        self._thread.start()
        self.send({"type": "hello", "pid": self._pid})

    def send(self, message: dict[str, Any]) -> bool:
        """Send a message; whether the launcher has it. A forked child has no line."""
        if os.getpid() != self._pid:
            return False
        data = json.dumps({**message, "at_s": time.time()}, default=repr).encode()
        if len(data) > MAX_MESSAGE_BYTES:
            return False
        deadline = time.monotonic() + _SEND_TIMEOUT_S
        while True:
            try:
                self._sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                return True
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return False
                select.select([], [self._sock], [], max(0.0, deadline - time.monotonic()))
            except OSError:  # the launcher is gone
                return False

    def report(self, error: BaseException, *, how: str, is_printed: bool = True) -> bool:
        """Tell the launcher about an exception; whether it has been told. It shows what is not printed here."""
        try:
            described = describe_error(error, how=how)
        except Exception as problem:  # the report must never hide what it reports
            described = {"how": how, "kind": type(error).__name__, "message": f"cannot be described: {problem!r}"}
        if isinstance(error, SystemExit):
            described["exit_code"] = error.code if isinstance(error.code, int) else 1
        message = {"type": "raised", "is_printed": is_printed, **described, **self._watch.history(error)}
        for name in ("full", "groups", "traceback"):
            if len(json.dumps(message, default=repr)) > MAX_MESSAGE_BYTES - 1024:
                message.pop(name, None)
        return self.send(message)

    def say_goodbye(self) -> None:
        """Tell the launcher that the script came to its end."""
        self.send({"type": "bye", **self._watch.status()})

    def listen(self, kind: str, handler: Callable[[dict[str, Any]], None]) -> None:
        """Call `handler` on the line's thread with each message of that type, and with those that came before."""
        self._handlers[kind] = handler
        early = [message for message in self._unhandled if message["type"] == kind]
        self._unhandled = [message for message in self._unhandled if message["type"] != kind]
        for message in early:
            handler(message)

    def close(self) -> None:
        """End the thread and the line."""
        with contextlib.suppress(OSError):  # the other end was closed first
            self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(_SEND_TIMEOUT_S)
        self._sock.close()

    def _serve(self) -> None:
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        look_at_s = beat_at_s = time.monotonic()
        while True:
            due_s = min(look_at_s, beat_at_s) if self._beat_s else look_at_s
            if poller.poll(max(0.0, due_s - time.monotonic()) * 1000):
                try:
                    data = self._sock.recv(MAX_MESSAGE_BYTES)
                except OSError:
                    return
                if not data:
                    return
                self._answer(data)
            now_s = time.monotonic()
            if self._beat_s and now_s >= beat_at_s:
                beat_at_s = now_s + self._beat_s
                self._beats = self._beats or _has_group()
                if self._beats:
                    self.send({"type": "beat"})
            if now_s >= look_at_s:
                look_at_s = now_s + self._look()

    def _look(self) -> float:
        """Tell the launcher about a long wait; the seconds until the next look."""
        try:
            status, delay_s = self._watch.look()
        except Exception as problem:  # looking must never end the line
            self.send({"type": "trouble", "message": repr(problem)})
            return 1.0
        if status is not None:
            self.send({"type": "waiting", **status})
        return delay_s

    def _answer(self, data: bytes) -> None:
        try:
            message = json.loads(data)
        except ValueError:
            return
        if not isinstance(message, dict) or not isinstance(message.get("type"), str):
            return
        handler = self._handlers.get(message["type"])
        if message["type"] == "ask":
            self.send({"type": "status", **self._watch.status()})
        elif handler is not None:
            try:
                handler(message)
            except Exception as problem:  # nor may a handler
                self.send({"type": "trouble", "message": repr(problem)})
        else:
            self._unhandled = [*self._unhandled[-_MAX_UNHANDLED:], message]


_line: LauncherLine | None = None
_was_opened = False


def open_line() -> LauncherLine | None:
    """The line of this process, opened once if TORSH_LINE_FD names it; None without one.

    The variable is removed: it means nothing to a child process, which does not inherit the descriptor.
    """
    global _line, _was_opened
    if not _was_opened:
        _was_opened = True
        text = os.environ.pop(FD_VARIABLE, "")
        sock = _socket_of(text)
        if sock is not None:
            _line = LauncherLine(sock)
    return _line


@contextlib.contextmanager
def line_over(sock: socket.socket) -> Iterator[LauncherLine]:
    """A line over `sock` for the length of a `with` block, for a rank that runs inside an engine's own process."""
    global _line, _was_opened
    before = _line, _was_opened
    _line, _was_opened = LauncherLine(sock), True
    try:
        yield _line
    finally:
        line, (_line, _was_opened) = _line, before
        line.close()


def _has_group() -> bool:
    """Whether this process is in a process group of torch's; never imports it."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    return bool(getattr(c10d, "is_initialized", bool)())


def _socket_of(text: str) -> socket.socket | None:
    if not text.isdigit():
        return None
    try:
        sock = socket.socket(fileno=int(text))
        sock.set_inheritable(False)
    except OSError:  # closed, or something else by now: this process is not the worker itself
        return None
    if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_SEQPACKET:
        sock.detach()
        return None
    return sock


def watch_threads() -> None:
    """Report exceptions that end a thread; what was there before is called afterwards."""
    line = open_line()
    if line is None:
        return
    previous = threading.excepthook

    def tell(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            line.report(args.exc_value, how="thread")
        previous(args)

    threading.excepthook = tell


def join_late() -> None:
    """For a process that `worker_start` did not start (a command of the user's): report what its hooks can see."""
    if _was_opened:
        return
    line = open_line()
    if line is None:
        return
    watch_threads()
    previous = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        is_plain = _is_plain(previous)
        is_told = line.report(error.with_traceback(trace), how="uncaught", is_printed=not is_plain)
        if not (is_told and is_plain):
            previous(kind, error, trace)

    sys.excepthook = tell


def note_error_in_flight() -> None:
    """Called before a group is destroyed: an exception on its way out is reported now, before the peers notice."""
    error = sys.exception()
    if _line is not None and error is not None and not isinstance(error, SystemExit | KeyboardInterrupt):
        _line.report(error, how="leaving")


def leave(error: BaseException) -> None:
    """The script ended with `error`: report it, and keep Python from printing what the launcher will show.

    A hook of the user's own is still called. Without a launcher everything is printed as ever.
    """
    line = _line
    is_exit = isinstance(error, SystemExit)
    if is_exit and error.code in (None, 0):  # type: ignore[attr-defined]  # SystemExit has it
        if line is not None:
            line.say_goodbye()
        return
    previous = sys.excepthook
    is_plain = _is_plain(previous)
    how = "exit" if is_exit else "uncaught"
    is_told = line is not None and line.report(error, how=how, is_printed=is_exit or not is_plain)

    def finish(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if is_told and is_plain:
            return
        bare = without_start(error)
        previous(kind, bare, bare.__traceback__)

    sys.excepthook = finish


def _is_plain(hook: Any) -> bool:
    """Whether a hook only prints: Python's own, or torch's around it."""
    while getattr(hook, "__name__", "") == "_distributed_excepthook" and hook.__closure__:
        cells = dict(zip(hook.__code__.co_freevars, hook.__closure__, strict=True))
        hook = cells["old_hook"].cell_contents if "old_hook" in cells else None
    return hook is sys.__excepthook__
