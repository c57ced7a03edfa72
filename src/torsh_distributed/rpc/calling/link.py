"""The caller's end of a connection: many calls under way, and the thread that waits reads the socket itself.

Why: a reply that another thread reads costs a change of threads, which takes longer than the call. With several
waiting threads one reads for all and passes the role on. The loop reads only while somebody wants to be called back.
"""

from __future__ import annotations

import itertools
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from torsh_distributed.comm.transport.lane import Lane
from torsh_distributed.errors import CommunicationError, OperationTimeout, SerializationError, TorshError
from torsh_distributed.rpc.messages.decoding import UnknownPart
from torsh_distributed.rpc.messages.encoding import ValueRegistry, encode
from torsh_distributed.rpc.messages.lane_pair import CANCEL, ERROR, ITEM, MORE, REPLY, LanePair
from torsh_distributed.rpc.messages.remote_errors import remote_error

_LONGEST_POLL_S = 1e6
"""What poll takes."""
_MOST_UNREAD = 64
"""Calls under way, after which sending another one also reads what has arrived."""


class PendingCall:
    """A call under way."""

    __slots__ = ("deadline_s", "error", "event", "function", "id", "is_done", "items", "on_done", "value")

    def __init__(self, function: str, deadline_s: float) -> None:
        self.id = 0
        self.function = function
        self.deadline_s = deadline_s
        self.is_done = False
        self.value: Any = None
        self.error: Exception | None = None
        self.event: threading.Event | None = None
        self.on_done: Callable[[], None] | None = None
        self.items: deque[Any] | None = None

    def expect_items(self) -> None:
        """It is a stream."""
        self.items = deque()

    def finish(self, value: Any, error: Exception | None) -> None:
        """From the thread that reads."""
        self.value, self.error = value, error
        self.is_done = True
        if self.event is not None:
            self.event.set()
        on_done = self.on_done  # who is called sets it to None
        if on_done is not None:
            on_done()


class Link:
    """Calls functions of one other process. Any thread."""

    def __init__(self, peer: str, lanes: LanePair, registry: ValueRegistry) -> None:
        self.peer = peer
        self._lanes = lanes
        self._registry = registry
        self._ids = itertools.count(1)
        self._pending: dict[int, PendingCall] = {}
        self._lock = threading.Lock()
        self._has_reader = False
        self._num_observers = 0
        self._waiting: list[PendingCall] = []
        self._poller = select.poll()
        for lane in lanes.lanes():
            self._poller.register(lane.fileno(), select.POLLIN)
        self._by_fd = {lane.fileno(): lane for lane in lanes.lanes()}
        self.lost: Exception | None = None
        self.last_used_s = time.monotonic()

    @property
    def is_lost(self) -> bool:
        """Whether the peer is gone."""
        return self.lost is not None

    @property
    def num_pending(self) -> int:
        """Calls under way."""
        return len(self._pending)

    def begin(self, kind: int, target: Any, args: Any, kwargs: Any, pending: PendingCall, *rest: Any) -> None:
        """Send a call. SerializationError if it cannot travel; CommunicationError if the peer is gone."""
        now_s = time.monotonic()
        self.last_used_s = now_s
        pending.id = next(self._ids)
        message = [kind, pending.id, target, pending.deadline_s - now_s, args, kwargs, *rest]
        encoded = encode(message, self._registry)
        with self._lock:
            if self.lost is not None:
                raise self._gone(self.lost)
            self._pending[pending.id] = pending
        try:
            self._lanes.send(encoded, pending.deadline_s)
        except OSError as error:
            if isinstance(error, TorshError):
                self._pending.pop(pending.id, None)
                raise
            self._fail(error)
        except BaseException:
            self._pending.pop(pending.id, None)
            raise
        if len(self._pending) > _MOST_UNREAD and len(self._pending) % _MOST_UNREAD == 0:
            self.poll()

    def wait(self, pending: PendingCall) -> Any:
        """The result; raises what the callee raised, OperationTimeout at the deadline, CommunicationError."""
        self.settle(pending)
        if pending.error is not None:
            raise pending.error
        return pending.value

    def settle(self, pending: PendingCall) -> None:
        """Wait until it has ended, in whatever way."""
        while not pending.is_done:
            self._advance(pending)

    def settle_all(self) -> None:
        """Wait for everything that is under way."""
        for pending in list(self._pending.values()):
            self.settle(pending)

    def wait_for_item(self, pending: PendingCall) -> bool:
        """Wait until a stream has an item; False if it has ended."""
        assert pending.items is not None, "of a stream"
        while not pending.items:
            if pending.is_done:
                if pending.error is not None:
                    raise pending.error
                return False
            self._advance(pending)
        return True

    def ask_for_more(self, pending: PendingCall, num_items: int) -> None:
        """The reader of a stream has taken items; the callee may send more."""
        self._send_quietly([MORE, pending.id, num_items])

    def cancel(self, pending: PendingCall, error: Exception) -> None:
        """Give a call up, here and there."""
        if self._pending.pop(pending.id, None) is not None:
            self._send_quietly([CANCEL, pending.id])
            pending.finish(None, error)

    def expire(self, pending: PendingCall) -> None:
        """The call's time is over."""
        error = OperationTimeout(
            "a remote call did not end in time",
            hint="the callee was told to give it up; raise timeout_s, or find out what it waits for",
            operation=pending.function,
            worker=self.peer,
        )
        self.cancel(pending, error)

    def _send_quietly(self, message: list[Any]) -> None:
        """For messages that do not matter once the peer is gone."""
        try:
            self._lanes.send(encode(message, self._registry), None)
        except OSError as error:
            self._fail(error)

    # Reading

    def observe(self) -> None:
        """From now on the loop reads whenever nobody waits, until `unobserve`."""
        with self._lock:
            self._num_observers += 1
            if not self._has_reader and self._num_observers > 0:
                self._have_loop_read(True)

    def unobserve(self) -> None:
        """Undo one `observe`."""
        with self._lock:
            self._num_observers -= 1
            if not self._num_observers:
                self._have_loop_read(False)

    def poll(self) -> None:
        """Take what has arrived, without waiting; nothing if somebody reads already.

        There is one reader at a time: a thread that waits for a socket does not notice what another one takes from it.
        """
        with self._lock:
            if self._has_reader:
                return
            self._has_reader = True
        try:
            self._read_and_deliver(self._lanes.lanes())
        finally:
            self._give_role_up()

    def _have_loop_read(self, reads: bool) -> None:
        for lane in self._lanes.lanes():
            lane.watch(self.poll if reads else None)

    def _advance(self, pending: PendingCall) -> None:
        """Read, or wait for the one who reads, until something has happened."""
        remaining_s = pending.deadline_s - time.monotonic()
        if remaining_s <= 0:
            self.expire(pending)
            return
        if not self._takes_role():
            self._wait_for_reader(pending, remaining_s)
            return
        try:
            while not pending.is_done and not pending.items:
                remaining_s = pending.deadline_s - time.monotonic()
                if remaining_s <= 0:
                    return
                ready = self._poller.poll(min(remaining_s, _LONGEST_POLL_S) * 1000 + 1)
                self._read_and_deliver([self._by_fd[fd] for fd, _ in ready])
        finally:
            self._give_role_up()

    def _give_role_up(self) -> None:
        with self._lock:
            self._has_reader = False
            if self._waiting or self._num_observers:
                self._pass_role_on()

    def _takes_role(self) -> bool:
        with self._lock:
            if self._has_reader:
                return False
            self._has_reader = True
            if self._num_observers:
                self._have_loop_read(False)
            return True

    def _wait_for_reader(self, pending: PendingCall, timeout_s: float) -> None:
        with self._lock:
            if not self._has_reader:
                return
            event = pending.event = threading.Event()
            self._waiting.append(pending)
        # The reader marks it as done first and looks for the event then; here it is the other way round.
        if not pending.is_done and not pending.items:
            event.wait(timeout_s)
        if pending.is_done or pending.items or not event.is_set():
            # If it was woken to read, another one has to.
            self._wake_next()

    def _wake_next(self) -> None:
        """Unless somebody reads: the first that waits reads on, or the loop if there is none."""
        with self._lock:
            if not self._has_reader:
                self._pass_role_on()

    def _pass_role_on(self) -> None:
        while self._waiting:
            pending = self._waiting.pop(0)
            if not pending.is_done and pending.event is not None:
                pending.event.set()
                return
        if self._num_observers:
            self._have_loop_read(True)

    def _read_and_deliver(self, lanes: list[Lane]) -> None:
        """Take what has arrived. The one reader calls this."""
        try:
            for lane in lanes:
                for opened in lane.receive():
                    self._deliver(opened.read(self._registry))
        except OSError as error:
            self._fail(error)

    def _deliver(self, message: list[Any]) -> None:
        kind, number = message[0], message[1]
        if kind == ITEM:
            pending = self._pending.get(number)
            if pending is not None and pending.items is not None:
                pending.items.append(message[2])
                if pending.event is not None:
                    pending.event.set()
            return
        pending = self._pending.pop(number, None)
        if pending is None or kind not in (REPLY, ERROR):
            return  # it was given up
        if kind == ERROR:
            pending.finish(None, remote_error(message[2], self.peer, pending.function))
        elif len(message) == 4 and isinstance(message[3], UnknownPart):
            pending.finish(None, _not_known(message[3].name, pending.function))
        else:
            pending.finish(message[2], None)

    def _gone(self, reason: Exception) -> CommunicationError:
        return CommunicationError(
            f"the connection to {self.peer} was lost: {reason}",
            hint="look at the other worker's output: it may have ended, or it refused a message",
            worker=self.peer,
        )

    def _fail(self, error: Exception) -> None:
        """The peer is gone: everything that is under way fails now."""
        with self._lock:
            if self.lost is None:
                self.lost = error
            lost, self._pending = self._pending, {}
        self._lanes.close()
        for pending in lost.values():
            pending.finish(None, self._gone(self.lost))

    def drop_idle(self) -> None:
        """Give memory back that large payloads went through some time ago."""
        self._lanes.drop_idle()

    def close(self) -> None:
        """Calls under way fail."""
        self._fail(ConnectionResetError("this worker closed it"))


def _not_known(name: str, function: str) -> SerializationError:
    return SerializationError(
        f"the result has a {name} that is not known here",
        hint="register it with rpc.sendable, or expose it, in this process too",
        function=function,
    )
