"""What a store's clients ask for, done on its table: at once, or when keys arrive that they wait for."""

from __future__ import annotations

import heapq
import itertools
import json
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from torsh_distributed.comm.store.table import Table
from torsh_distributed.comm.store.tcp import tcp_protocol
from torsh_distributed.comm.store.tcp.tcp_protocol import TcpField
from torsh_distributed.errors import InvalidArgument

_KEY_HEADER_BYTES = tcp_protocol.KEY_HEADER.size


class Waiter(Protocol):
    """Who asks: a connection."""

    is_open: bool


PeerT = TypeVar("PeerT", bound=Waiter)


class _KeyWait(Generic[PeerT]):
    """A client that waits for keys. It is kept under one that is missing, and looks again when that arrives."""

    __slots__ = ("is_over", "keys", "next_index", "peer")

    def __init__(self, peer: PeerT, keys: list[str]) -> None:
        self.peer = peer
        self.keys = keys
        self.next_index = 0
        """Keys before this one were there when they were looked for."""
        self.is_over = False


class StoreRequests(Generic[PeerT]):
    """The table of one store, and who waits for its keys; `tell` sends a reply later than its request."""

    def __init__(self, tell: Callable[[PeerT, bytes], None]) -> None:
        self._tell = tell
        self._table = Table()
        self._waiting: dict[str, list[_KeyWait[PeerT]]] = {}
        self.deadlines: list[tuple[float, int, _KeyWait[PeerT]]] = []
        """A heap: when waits end, the next one first; some are over by then."""
        self._order = itertools.count()

    def end_due(self, now_s: float) -> None:
        """Tell those whose time to wait is over."""
        while self.deadlines and self.deadlines[0][0] <= now_s:
            wait = heapq.heappop(self.deadlines)[2]
            if not wait.is_over:
                self._end_wait(wait)

    def answer(self, peer: PeerT, body: bytes) -> bytes | None:
        """Do one request on the table; None if there is no reply, or not yet."""
        op = body[:1]
        if op == tcp_protocol.SET:
            start = _KEY_HEADER_BYTES
            if len(body) >= start:
                start += tcp_protocol.KEY_HEADER.unpack_from(body)[1]
            if len(body) < start:
                raise ValueError("a write ends within its key")
            key = body[_KEY_HEADER_BYTES:start].decode()
            self._table.set(key, body[start:], None)
            if key in self._waiting:
                self._wake(key)
            return None
        if op == tcp_protocol.GET:
            value = self._table.get(body[1:].decode())
            return tcp_protocol.MISSING if value is None else tcp_protocol.DONE + value
        if op == tcp_protocol.CHECK:
            return tcp_protocol.MISSING if self._table.entry(body[1:].decode()) is None else tcp_protocol.DONE
        try:
            if op == tcp_protocol.ADD:
                return self._add(body)
            if op != tcp_protocol.FIELDS:
                raise ValueError(f"it asked for {op!r}")
            name, *args = tcp_protocol.decode(body[1:]) or [None]
            if name == b"wait":
                return self._start_wait(peer, args)
            return tcp_protocol.DONE + tcp_protocol.encode(self._apply(name, args))
        except InvalidArgument as error:
            return tcp_protocol.INVALID + json.dumps(error.to_dict()).encode()

    def _add(self, body: bytes) -> bytes:
        if len(body) < tcp_protocol.ADD_HEADER.size:
            raise ValueError("an addition ends within its number")
        key = body[tcp_protocol.ADD_HEADER.size :].decode()
        total = self._table.add(key, tcp_protocol.ADD_HEADER.unpack_from(body)[1])
        if key in self._waiting:
            self._wake(key)
        return tcp_protocol.DONE + str(total).encode()

    def _apply(self, op: TcpField, args: list[TcpField]) -> list[TcpField]:
        """Do one operation of the general form."""
        table = self._table
        match op, args:
            case b"get", names:
                return [table.get(key) for key in _keys(names)]
            case b"set", [bytes(key), bytes(value), ttl_s]:
                return self._write(key, lambda name: table.set(name, value, _seconds(ttl_s)))
            case b"delete", [bytes(key)]:
                return [tcp_protocol.number(int(table.delete(key.decode())))]
            case b"cas", [bytes(key), expected, bytes(desired), ttl_s]:
                swap = table.compare_and_swap(key.decode(), expected, desired, _seconds(ttl_s))
                if swap:
                    self._wake(key.decode())
                return [tcp_protocol.number(int(swap.swapped)), swap.value]
            case b"append", [bytes(key), bytes(suffix)]:
                return self._write(key, lambda name: table.append(name, suffix))
            case b"count", [bytes(prefix)]:
                return [tcp_protocol.number(table.count(prefix.decode()))]
            case b"flush", []:
                return []
        raise ValueError(f"it asked for {op!r} with {len(args)} arguments")

    def _write(self, key: bytes, action: Callable[[str], int | None]) -> list[TcpField]:
        name = key.decode()
        result = action(name)
        self._wake(name)
        return [tcp_protocol.number(result)]

    # Waiting for keys

    def _start_wait(self, peer: PeerT, args: list[TcpField]) -> bytes | None:
        """The reply if all keys are there or no time is given; otherwise the client is told later."""
        timeout_s, *names = args
        keys = _keys(names)
        missing = self._table.missing(keys)
        remaining_s = _seconds(timeout_s) or 0.0
        if not missing or remaining_s <= 0:
            return _still_missing(missing)
        wait = _KeyWait(peer, keys)
        self._keep_waiting(wait, keys.index(missing[0]))
        heapq.heappush(self.deadlines, (time.monotonic() + remaining_s, next(self._order), wait))
        return None

    def _wake(self, key: str) -> None:
        for wait in self._waiting.pop(key, ()):
            if wait.is_over or not wait.peer.is_open:
                continue
            # From where it stopped: a wait for all ranks' keys would otherwise look at all of them for each that comes.
            index = self._first_missing(wait.keys, wait.next_index)
            if index is None:
                index = self._first_missing(wait.keys, 0)  # one may have been deleted since
            if index is None:
                self._end_wait(wait)
            else:
                self._keep_waiting(wait, index)

    def _first_missing(self, keys: list[str], start: int) -> int | None:
        entry = self._table.entry
        return next((index for index in range(start, len(keys)) if entry(keys[index]) is None), None)

    def _keep_waiting(self, wait: _KeyWait[PeerT], index: int) -> None:
        wait.next_index = index
        self._waiting.setdefault(wait.keys[index], []).append(wait)

    def _end_wait(self, wait: _KeyWait[PeerT]) -> None:
        wait.is_over = True
        if wait.peer.is_open:
            reply = _still_missing(self._table.missing(wait.keys))
            self._tell(wait.peer, reply)


def _keys(names: list[TcpField]) -> list[str]:
    return [name.decode() for name in names if name is not None]


def _seconds(field: TcpField) -> float | None:
    return None if field is None else float(field)


def _still_missing(keys: list[str]) -> bytes:
    return tcp_protocol.DONE + tcp_protocol.encode([key.encode() for key in keys])
