"""The callee's side: accepts the links of callers, and runs what they call.

Two loops read, one for small messages and one for payloads. A function that was exposed as inline runs on the
loop that read its call; all others run on a bounded number of threads.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from torsh_distributed.comm.transport.connection import Connection
from torsh_distributed.comm.transport.event_loop import EventLoop
from torsh_distributed.comm.transport.frames import BadFrame, FrameLimits
from torsh_distributed.comm.transport.lane import Lane
from torsh_distributed.comm.transport.listener import Listener
from torsh_distributed.comm.transport.proof import ProvedSocket
from torsh_distributed.comm.trust.stranger_pool import PROOF_TIMEOUT_S
from torsh_distributed.errors import SerializationError, TorshError
from torsh_distributed.rpc.messages.decoding import Opened, UnknownPart
from torsh_distributed.rpc.messages.encoding import ValueRegistry, encode
from torsh_distributed.rpc.messages.lane_pair import (
    CALL,
    CANCEL,
    ERROR,
    HELLO,
    LANE_NAMES,
    MORE,
    PROTOCOL,
    REMOTE,
    REPLY,
    STREAM,
    STREAM_WINDOW,
    LanePair,
)
from torsh_distributed.rpc.messages.remote_errors import describe_error
from torsh_distributed.rpc.serving.exposed import TABLE, Exposed
from torsh_distributed.rpc.serving.served_call import ServedCall
from torsh_distributed.rpc.serving.worker_threads import WorkerThreads

_log = logging.getLogger(__name__)
_MOST_CALLS = 1024
"""Calls of one link under way; it is not read while it has more."""
_MOST_UNSENT_BYTES = 8 << 20
"""Answers that a caller does not read; nothing more is read from it then."""
_PLAIN_TYPES = frozenset({type(None), bool, int, float, str, bytes, list, dict, tuple, Tensor})
_HELLO_LIMITS = FrameLimits(head_bytes=1 << 12)


class CallTargets(Protocol):
    """What calls are looked up in."""

    def resolve(self, target: Any) -> tuple[Exposed, Callable[..., Any]]:
        """What a target means here; InvalidArgument if nothing."""

    def prepare(self, call: ServedCall, kind: int, args: list[Any], rest: list[Any]) -> bool:
        """Before a call runs; whether it may run on the loop."""


class ServedLink:
    """One caller's link."""

    def __init__(self, server: CallServer, key: str, caller: str, most_payload_bytes: int) -> None:
        self.key = key
        self.caller = caller
        self.pair = LanePair(most_payload_bytes)
        self._server = server
        self._lock = threading.Lock()
        self._calls: dict[int, ServedCall] = {}
        self._is_paused = False

    def add(self, proved: ProvedSocket, name: str, loop: EventLoop) -> bool:
        """One of the two lanes is here; whether both are. Nothing is read before: an answer may need the other one."""
        if getattr(self.pair, name) is not None:
            raise BadFrame(f"a second lane of {name} messages")
        self.pair.add(proved, name, loop).on_drained = self._resume
        return len(self.pair.lanes()) == 2

    def begin_reading(self) -> None:
        """Both lanes are here. TLS may have taken what came behind the hello, which no poll would show."""
        for lane in self.pair.lanes():
            lane.watch(lambda lane=lane: self._receive(lane))  # type: ignore[misc]
            lane.loop.call_at(time.monotonic(), lambda lane=lane: self._receive(lane))  # type: ignore[misc]

    def _receive(self, lane: Lane) -> None:
        """On the lane's loop."""
        try:
            for opened in lane.receive():
                self._take(opened)
        except Exception as error:
            if isinstance(error, BadFrame):
                _log.warning("the connection of %s was closed: %s", self.caller, error)
            elif not isinstance(error, OSError):
                _log.exception("a message of %s could not be handled", self.caller)
            self._server.drop(self)
            return
        if self._has_too_much():
            self._pause()

    def _take(self, opened: Opened) -> None:
        message = opened.read(self._server.registry)
        kind, number = message[0], message[1]
        if type(number) is not int:
            raise BadFrame("a message without a number")
        if kind == CALL and len(message) == 6 and self._has_run_inline(message):
            return
        if kind in (CALL, STREAM, REMOTE):
            self._begin(message)
            return
        call = self._calls.get(number)
        if call is None:
            return  # it has ended meanwhile
        if kind == CANCEL:
            call.cancel()
        elif kind == MORE and len(message) == 3 and type(message[2]) is int and message[2] > 0:
            call.more(message[2])
        else:
            raise BadFrame("a message of an unknown kind")

    def _has_run_inline(self, message: list[Any]) -> bool:
        """The short way of a call that takes less time than everything around it; whether it has been answered."""
        _, number, target, remaining_s, args, kwargs = message
        exposed = TABLE.find(target) if type(target) is str else None
        if exposed is None or not exposed.is_inline:
            return False
        if kwargs or type(args) is not list or type(remaining_s) is not float or remaining_s <= 0:
            return False
        try:
            result = exposed.function(*args)
            if type(result) in _PLAIN_TYPES:
                self.answer([REPLY, number, result], deadline_s=None)
                return True
        except Exception as error:  # of the function, or a result that cannot travel
            self.answer([ERROR, number, describe_error(error)], deadline_s=None)
            return True
        call = self._new_call(CALL, number, exposed, exposed.function, [], {}, remaining_s)
        with self._lock:
            self._calls[number] = call
        call.take(result)  # a future, or what cannot travel
        return True

    def _begin(self, message: list[Any]) -> None:
        kind, number, target, remaining_s, args, kwargs = _checked_call(message)
        try:
            if isinstance(message[-1], UnknownPart):
                raise SerializationError(
                    f"an argument has a {message[-1].name} that is not known at the callee",
                    hint="register it with rpc.sendable, or expose it, there too",
                )
            exposed, function = self._server.targets.resolve(target)
            call = self._new_call(kind, number, exposed, function, args, kwargs, remaining_s)
            runs_here = self._server.targets.prepare(call, kind, args, message[6:]) and exposed.is_inline
        except TorshError as error:
            self.answer([ERROR, number, describe_error(error)], deadline_s=None)
            return
        with self._lock:
            self._calls[number] = call
        if runs_here and kind != STREAM:
            call.run()
        else:
            exposed.begin(lambda: self._server.threads.submit(call.run))

    def _new_call(
        self,
        kind: int,
        number: int,
        exposed: Exposed,
        function: Callable[..., Any],
        args: list[Any],
        kwargs: dict[str, Any],
        remaining_s: float,
    ) -> ServedCall:
        call = ServedCall(
            number=number,
            kind=kind,
            caller=self.caller,
            exposed=exposed,
            function=function,
            args=args,
            kwargs=kwargs,
            remaining_s=remaining_s,
            sender=self,
            window=STREAM_WINDOW,
        )
        call.run_later = self._server.threads.submit
        return call

    def answer(self, message: list[Any], *, deadline_s: float | None) -> None:
        """Send an answer; TorshError if it cannot travel."""
        if deadline_s is not None and self._server.is_on_loop:
            deadline_s = None
        try:
            self.pair.send(encode(message, self._server.registry), deadline_s)
        except TorshError:
            raise
        except OSError:
            self._server.drop(self)

    def forget(self, call: ServedCall) -> None:
        """The call has been answered."""
        with self._lock:
            self._calls.pop(call.number, None)
        if self._is_paused:
            self._resume()

    def _has_too_much(self) -> bool:
        return len(self._calls) > _MOST_CALLS or self.pair.num_unsent > _MOST_UNSENT_BYTES

    def _pause(self) -> None:
        """Read nothing until calls have ended and their answers are read."""
        with self._lock:
            self._is_paused = True
            for lane in self.pair.lanes():
                lane.watch(None)
        self._resume()  # what was too much may be gone already

    def _resume(self) -> None:
        """A call has ended, or a lane has sent everything."""
        with self._lock:
            if not self._is_paused or self._has_too_much():
                return
            self._is_paused = False
            for lane in self.pair.lanes():
                lane.watch(lambda lane=lane: self._receive(lane))  # type: ignore[misc]

    def close(self) -> None:
        """The caller is gone: what it had called is given up."""
        self.pair.close()
        with self._lock:
            calls = list(self._calls.values())
        for call in calls:
            call.cancel()


def _checked_call(message: list[Any]) -> tuple[int, int, Any, float, list[Any], dict[str, Any]]:
    if len(message) < 6:
        raise BadFrame("a call with too few parts")
    kind, number, target, remaining_s, args, kwargs = message[:6]
    is_call = isinstance(remaining_s, int | float) and isinstance(args, list) and isinstance(kwargs, dict)
    if not is_call or not all(isinstance(key, str) for key in kwargs):
        raise BadFrame("a call with a part of another type")
    return kind, number, target, float(remaining_s), args, kwargs


def _checked_hello(hello: Any) -> tuple[str, str, str]:
    is_hello = isinstance(hello, list) and len(hello) == 4 and hello[0] == HELLO
    if not is_hello or not all(isinstance(part, str) for part in hello[1:]) or hello[2] not in LANE_NAMES:
        raise BadFrame("a connection that does not begin with a hello")
    return hello[1], hello[2], hello[3]


class CallServer:
    """Serves callers on these sockets until it is closed."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        secret: bytes,
        *,
        targets: CallTargets,
        registry: ValueRegistry,
        num_threads: int,
        most_payload_bytes: int,
    ) -> None:
        self.targets = targets
        self.registry = registry
        self.threads = WorkerThreads("rpc-call", num_threads)
        self._most_payload_bytes = most_payload_bytes
        self._loops = {name: EventLoop(f"rpc-{name}") for name in LANE_NAMES}
        self._lock = threading.Lock()
        self._links: dict[str, ServedLink] = {}
        self._is_closed = False
        self._listener = Listener(sockets, secret, PROTOCOL, loop=self._loops["small"], admit=self._admit)

    @property
    def is_on_loop(self) -> bool:
        """Whether this thread reads for all callers, so that it may not wait."""
        return any(loop.is_current for loop in self._loops.values())

    @property
    def num_links(self) -> int:
        """Callers that are connected."""
        return len(self._links)

    def _admit(self, proved: ProvedSocket) -> None:
        """A member of the job: its first message says whose lane this is, and which. On a thread of its own."""
        try:
            hello, _ = Connection(proved, _HELLO_LIMITS, PROOF_TIMEOUT_S).receive()
            key, name, caller = _checked_hello(hello)
            with self._lock:
                if self._is_closed:
                    raise ConnectionResetError("no more calls are taken")
                link = self._links.get(key)
                if link is None:
                    link = self._links[key] = ServedLink(self, key, caller, self._most_payload_bytes)
                    self._loops["small"].call_at(time.monotonic() + PROOF_TIMEOUT_S, lambda: self._drop_half(link))
                is_complete = link.add(proved, name, self._loops[name])
        except BaseException:
            proved.sock.close()
            raise
        if is_complete:
            link.begin_reading()

    def _drop_half(self, link: ServedLink) -> None:
        """The second lane did not come."""
        if len(link.pair.lanes()) < 2:
            self.drop(link)

    def drop(self, link: ServedLink) -> None:
        """A caller has left, or sent what is not a message."""
        with self._lock:
            self._links.pop(link.key, None)
        link.close()

    def drop_idle(self) -> None:
        """Give memory back that large payloads went through some time ago."""
        with self._lock:
            links = list(self._links.values())
        for link in links:
            link.pair.drop_idle()

    def close(self, timeout_s: float) -> None:
        """End all links and threads."""
        with self._lock:
            self._is_closed = True
            links = list(self._links.values())
        self._listener.close()
        for link in links:
            self.drop(link)
        self.threads.close(timeout_s)
        for loop in self._loops.values():
            loop.close()
