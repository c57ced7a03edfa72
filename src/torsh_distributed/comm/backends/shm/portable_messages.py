"""Point-to-point for the portable core: rings of fragments, each counted by two semaphores.

The rules are those of `native/mail.c`: receives are matched in the order they were posted, messages of a pair in the
order they were sent. A message leaves the ring only if a receive from its sender is posted, and is set aside if that
receive wants a later one.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, field

from torsh_distributed.comm.backends.shm import semaphores
from torsh_distributed.comm.backends.shm.codes import Status
from torsh_distributed.comm.backends.shm.core import Receipt
from torsh_distributed.comm.backends.shm.portable_layout import PortableView

_HEADER = struct.Struct("<QqQQ")  # bytes of the message, tag, bytes before this fragment, bytes in it
_SLICE_S = 0.04
_OVERTAKEN_LIMIT_BYTES = 1 << 30
_ANY_SOURCE = -1


@dataclass(slots=True)
class _Order:
    number: int
    address: int
    num_bytes: int
    peer: int
    tag: int
    deadline: float
    moved: int = 0


@dataclass(slots=True)
class _Message:
    """A message on its way out of the ring: to the receive that wants it, or aside."""

    num_bytes: int
    tag: int
    wanted_by: _Order | None
    aside: bytearray | None
    moved: int = 0


@dataclass(slots=True)
class _Inbox:
    fragments: int = 0
    has_fragment: bool = False
    """A fragment was taken from the semaphore and not yet read: no receive has wanted its message."""
    current: _Message | None = None
    overtaken: deque[_Message] = field(default_factory=deque)


class _Overflow(Exception):
    """Ends a call: too much was set aside."""


class PortableMessages:
    """Pending sends and receives of one rank, and what moves them."""

    def __init__(self, view: PortableView) -> None:
        n = view.layout.num_ranks
        self._view = view
        self._lock = threading.Lock()
        self._sends: list[deque[_Order]] = [deque() for _ in range(n)]
        self._sent_fragments = [0] * n
        self._is_backed = [False] * n
        self._posted: list[_Order] = []
        self._inboxes = [_Inbox() for _ in range(n)]
        self._overtaken_bytes = 0
        self._done: list[Receipt] = []

    def send(
        self, number: int, address: int, num_bytes: int, peer: int, tag: int, timeout_ns: int
    ) -> Receipt | int | None:
        """Start a send; see `core.Core`."""
        order = _Order(number, address, num_bytes, peer, tag, time.monotonic() + timeout_ns / 1e9)
        with self._lock:
            self._sends[peer].append(order)
            return self._acknowledge(number, [peer])

    def receive(
        self, number: int, address: int, num_bytes: int, peer: int, tag: int, timeout_ns: int
    ) -> Receipt | int | None:
        """Start a receive; see `core.Core`."""
        order = _Order(number, address, num_bytes, peer, tag, time.monotonic() + timeout_ns / 1e9)
        sources = range(len(self._inboxes)) if peer == _ANY_SOURCE else [peer]
        with self._lock:
            if not any(self._claim(order, source) for source in sources):
                self._posted.append(order)
            return self._acknowledge(number, list(sources))

    def _acknowledge(self, number: int, peers: list[int]) -> Receipt | int | None:
        status = self._move(peers)
        for receipt in self._done:
            if receipt[0] == number:
                self._done.remove(receipt)
                return receipt
        if self._done:
            semaphores.post(self._view.bell(self._view.rank))
        return -status if status else None

    def progress(self, patience_ns: int) -> list[Receipt] | int:
        """Move messages until one is done or `patience_ns` is over."""
        end = time.monotonic() + patience_ns / 1e9
        everyone = list(range(len(self._inboxes)))
        look_for_dead = False
        while True:
            with self._lock:
                status = self._move(everyone) or (Status.OK if self._done else self._obstacle(look_for_dead))
                done, self._done = self._done, []
                is_idle = not self._posted and not any(self._sends) and not any(box.current for box in self._inboxes)
            if done:
                return done
            if status:
                return -status
            remaining_s = end - time.monotonic()
            if is_idle or remaining_s <= 0:
                return []
            look_for_dead = not semaphores.take(self._view.bell(self._view.rank), min(_SLICE_S, remaining_s))

    # --- moving -----------------------------------------------------------------------------------------------

    def _move(self, peers: list[int]) -> Status:
        if self._view.failure() is not None:
            return Status.POISONED
        try:
            for peer in peers:
                self._push(peer)
                if self._awaits(peer):
                    self._pull(peer)
        except OSError:
            return Status.NO_MEMORY
        except _Overflow:
            return Status.OVERFLOW
        return Status.OK

    def _push(self, peer: int) -> None:
        view, queue = self._view, self._sends[peer]
        room = view.layout.fragment_bytes - _HEADER.size
        while (
            queue and (self._is_backed[peer] or self._back(peer)) and semaphores.try_take(view.spaces(view.rank, peer))
        ):
            order = queue[0]
            length = min(room, order.num_bytes - order.moved)
            at = view.fragment(view.rank, peer, self._sent_fragments[peer])
            ctypes.memmove(at, _HEADER.pack(order.num_bytes, order.tag, order.moved, length), _HEADER.size)
            ctypes.memmove(at + _HEADER.size, order.address + order.moved, length)
            order.moved += length
            self._sent_fragments[peer] += 1
            semaphores.post(view.items(view.rank, peer))
            self._ring(peer)
            if order.moved == order.num_bytes:
                queue.popleft()
                self._done.append((order.number, Status.OK, peer, order.num_bytes))

    def _back(self, peer: int) -> bool:
        self._view.back_ring(peer)
        self._is_backed[peer] = True
        return True

    def _ring(self, peer: int) -> None:
        """Wake a rank that waits for messages; one post is enough for any number of events."""
        bell = self._view.bell(peer)
        if semaphores.value(bell) == 0:
            semaphores.post(bell)

    def _pull(self, source: int) -> None:
        view, inbox = self._view, self._inboxes[source]
        while True:
            if not inbox.has_fragment and not semaphores.try_take(view.items(source, view.rank)):
                return
            inbox.has_fragment = True
            at = view.fragment(source, view.rank, inbox.fragments)
            num_bytes, tag, before, length = _HEADER.unpack(ctypes.string_at(at, _HEADER.size))
            if before == 0 and inbox.current is None:
                inbox.current = self._open(source, num_bytes, tag)
            message = inbox.current
            if message is None:
                return
            self._store(message, at + _HEADER.size, length)
            inbox.has_fragment = False
            inbox.fragments += 1
            semaphores.post(view.spaces(source, view.rank))
            self._ring(source)
            if message.moved == message.num_bytes:
                inbox.current = None
                self._finish(message, source)

    def _open(self, source: int, num_bytes: int, tag: int) -> _Message | None:
        """The record of a message that leaves the ring, or None if it stays because no receive wants its sender."""
        wanting = [order for order in self._posted if order.peer in (source, _ANY_SOURCE)]
        match = next((order for order in wanting if order.tag == tag), None)
        if match is not None:
            self._posted.remove(match)
            if match.num_bytes == num_bytes:
                return _Message(num_bytes, tag, match, None)
            self._done.append((match.number, Status.MISMATCH, source, num_bytes))
            return _Message(num_bytes, tag, None, None)
        if not wanting:
            return None
        if self._overtaken_bytes + num_bytes > _OVERTAKEN_LIMIT_BYTES:
            raise _Overflow
        self._overtaken_bytes += num_bytes
        return _Message(num_bytes, tag, None, bytearray(num_bytes))

    @staticmethod
    def _store(message: _Message, address: int, length: int) -> None:
        if message.aside is not None:
            message.aside[message.moved : message.moved + length] = ctypes.string_at(address, length)
        elif message.wanted_by is not None:
            ctypes.memmove(message.wanted_by.address + message.moved, address, length)
        message.moved += length

    def _finish(self, message: _Message, source: int) -> None:
        if message.aside is None:
            if message.wanted_by is not None:
                self._done.append((message.wanted_by.number, Status.OK, source, message.num_bytes))
        elif message.wanted_by is not None:
            self._deliver(message, message.wanted_by, source)
        else:
            self._inboxes[source].overtaken.append(message)

    def _claim(self, order: _Order, source: int) -> bool:
        """Serve a new receive from what was set aside before it was posted, or is being set aside now."""
        inbox = self._inboxes[source]
        for message in inbox.overtaken:
            if message.tag == order.tag:
                inbox.overtaken.remove(message)
                self._deliver(message, order, source)
                return True
        current = inbox.current
        if current is not None and current.aside is not None and current.wanted_by is None and current.tag == order.tag:
            current.wanted_by = order
            return True
        return False

    def _deliver(self, message: _Message, order: _Order, source: int) -> None:
        self._overtaken_bytes -= message.num_bytes
        if order.num_bytes != message.num_bytes or message.aside is None:
            self._done.append((order.number, Status.MISMATCH, source, message.num_bytes))
            return
        ctypes.memmove(order.address, bytes(message.aside), message.num_bytes)
        self._done.append((order.number, Status.OK, source, message.num_bytes))

    # --- giving up --------------------------------------------------------------------------------------------

    def _awaits(self, source: int) -> bool:
        if self._inboxes[source].current is not None:
            return True
        return any(order.peer in (source, _ANY_SOURCE) for order in self._posted)

    def _depends_on(self, peer: int, *, is_dead: bool) -> bool:
        if self._sends[peer] or self._inboxes[peer].current is not None:
            return True
        return any(order.peer == peer or (is_dead and order.peer == _ANY_SOURCE) for order in self._posted)

    def _obstacle(self, look_for_dead: bool) -> Status:
        """Why waiting is pointless, or OK."""
        if self._view.is_left(self._view.rank):
            return Status.LEFT
        for peer in range(len(self._inboxes)):
            is_left = self._view.is_left(peer)
            is_dead = not is_left and look_for_dead and not self._view.is_alive(peer)
            if (is_left or is_dead) and self._depends_on(peer, is_dead=is_dead):
                status = self._move([peer])  # its last messages may have arrived after the rings were read
                if status or self._done:
                    return status
                return self._fail(Status.LEFT if is_left else Status.DEAD, peer)
        return self._expire()

    def _fail(self, status: Status, peer: int) -> Status:
        self._view.poison(status, peer, "")
        return status

    def _expire(self) -> Status:
        """End the group at the first deadline that has passed: the message may be half-way through the ring."""
        now = time.monotonic()
        receiving = [box.current.wanted_by for box in self._inboxes if box.current and box.current.wanted_by]
        for order in [*self._posted, *(order for queue in self._sends for order in queue), *receiving]:
            if now >= order.deadline:
                self._done.append((order.number, Status.TIMEOUT, order.peer, 0))
                return self._fail(Status.TIMEOUT, order.peer)
        return Status.OK
