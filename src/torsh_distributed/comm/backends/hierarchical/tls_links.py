"""Encrypted connections between the ranks of a group, and messages over them by key.

Each rank connects to every other; a connection carries messages one way, because Python's TLS does not read and write
at the same time. A reader per connection takes messages as they come, so a sender never waits for the other end's own
sending, and keeps them under (rank, key) until somebody takes them.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from torsh_distributed.comm.serial_thread import SerialThread
from torsh_distributed.comm.transport.connection import Connection
from torsh_distributed.comm.transport.frames import BadFrame, FrameLimits
from torsh_distributed.comm.transport.proof import prove
from torsh_distributed.comm.trust.job_tls import JobTls
from torsh_distributed.comm.trust.stranger_pool import PROOF_TIMEOUT_S
from torsh_distributed.errors import CommunicationError, OperationTimeout

_PROTOCOL = b"TORSHDT2"
_LIMITS = FrameLimits(head_bytes=64, payload_bytes=1 << 40)
_MAX_STRANGERS = 32
_RETRY_S = 0.1


class MessageKey(NamedTuple):
    """Which message of a rank: of a collective (its number, the part) or between two ranks (their tag)."""

    is_collective: bool
    number: int
    part: int = 0


Taker = Callable[[memoryview | Exception], None]


class _Mailbox:
    """Messages that have arrived, and those who wait for one; first come, first served."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._arrived: dict[tuple[int, MessageKey], deque[memoryview]] = {}
        self._takers: dict[tuple[int, MessageKey], deque[Taker]] = {}
        self._lost: dict[int, Exception] = {}

    def put(self, rank: int, key: MessageKey, body: memoryview) -> None:
        with self._changed:
            waiting = self._takers.get((rank, key))
            if not waiting:
                self._arrived.setdefault((rank, key), deque()).append(body)
                self._changed.notify_all()
                return
            taker = waiting.popleft()
        taker(body)

    def lose(self, rank: int, error: Exception) -> None:
        """No more comes from this rank."""
        with self._changed:
            self._lost.setdefault(rank, error)
            waiting = [taker for (home, _), takers in self._takers.items() if home == rank for taker in takers]
            self._takers = {place: takers for place, takers in self._takers.items() if place[0] != rank}
            self._changed.notify_all()
        for taker in waiting:
            taker(error)

    def take(self, rank: int, key: MessageKey, deadline_s: float) -> memoryview:
        place = (rank, key)
        with self._changed:
            self._changed.wait_for(
                lambda: place in self._arrived or rank in self._lost, max(0.0, deadline_s - time.monotonic())
            )
            body = self._pop(place)
            if body is not None:
                return body
            if rank in self._lost:
                raise self._lost[rank]
        raise TimeoutError

    def hand_over(self, rank: int, key: MessageKey, taker: Taker) -> None:
        """Call `taker` with the next message, now or when it arrives."""
        with self._changed:
            body: memoryview | Exception | None = self._pop((rank, key))
            body = self._lost.get(rank) if body is None else body
            if body is None:
                self._takers.setdefault((rank, key), deque()).append(taker)
                return
        taker(body)

    def withdraw(self, rank: int, key: MessageKey, taker: Taker) -> bool:
        """Stop waiting; whether it still did."""
        with self._changed:
            waiting = self._takers.get((rank, key), deque())
            if taker not in waiting:
                return False
            waiting.remove(taker)
            return True

    def _pop(self, place: tuple[int, MessageKey]) -> memoryview | None:
        waiting = self._arrived.get(place)
        if not waiting:
            return None
        body = waiting.popleft()
        if not waiting:
            del self._arrived[place]
        return body


class TlsLinks:
    """The connections of one rank, `index`, to the `num_ranks` - 1 others, whose addresses are `tell`'s result."""

    def __init__(
        self,
        tls: JobTls,
        secret: bytes,
        *,
        index: int,
        num_ranks: int,
        host: str,
        timeout_s: float,
        tell: Callable[[tuple[str, int]], Sequence[tuple[str, int]]],
    ) -> None:
        self._index, self._num_ranks = index, num_ranks
        self._deadline_s = time.monotonic() + timeout_s
        self._secret, self._tls = secret, tls
        self._mailbox = _Mailbox()
        self._incoming: dict[int, Connection] = {}
        self._outgoing: dict[int, Connection] = {}
        self._senders: dict[int, SerialThread] = {}
        self._joined = threading.Condition()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family, backlog=128) as listener:
            addresses = tell((host, listener.getsockname()[1]))
            accepting = threading.Thread(target=self._accept, args=(listener,), name="torsh-tls-accept", daemon=True)
            accepting.start()
            try:
                for other, address in enumerate(addresses):
                    if other != index:
                        self._outgoing[other] = self._connect(other, address)
                        self._senders[other] = SerialThread(f"torsh-tls-send-{other}")
                self._await_all()
            except BaseException:
                self.close()
                raise
            finally:
                # Wakes the thread that accepts.
                with contextlib.suppress(OSError):
                    listener.shutdown(socket.SHUT_RDWR)
                accepting.join()
        for other, connection in self._incoming.items():
            threading.Thread(
                target=self._read, args=(other, connection), name=f"torsh-tls-read-{other}", daemon=True
            ).start()

    def send(self, rank: int, key: MessageKey, body: memoryview) -> Future[None]:
        """Send after everything that was sent to that rank before; the memory must stay until the future is done."""
        return self._senders[rank].submit(self._send, rank, key, body)

    def take(self, rank: int, key: MessageKey, deadline_s: float) -> memoryview:
        """The next message of that rank with that key. Raises TimeoutError, or what ended the connection."""
        return self._mailbox.take(rank, key, deadline_s)

    def hand_over(self, rank: int, key: MessageKey, taker: Taker) -> None:
        """Call `taker` with the next message, or with what ended the connection; maybe on another thread."""
        self._mailbox.hand_over(rank, key, taker)

    def withdraw(self, rank: int, key: MessageKey, taker: Taker) -> bool:
        """Stop waiting; whether it still did."""
        return self._mailbox.withdraw(rank, key, taker)

    def close(self) -> None:
        """Cut every connection: who waits for a message of another rank gets an error."""
        for sender in self._senders.values():
            sender.stop()
        for connection in (*self._incoming.values(), *self._outgoing.values()):
            connection.cut()

    # Connecting

    def _connect(self, other: int, address: tuple[str, int]) -> Connection:
        while True:
            remaining_s = self._deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise OperationTimeout(
                    f"rank {other} of the group could not be reached under TLS at {address[0]}:{address[1]}",
                    operation="connect",
                )
            try:
                return self._greet(socket.create_connection((address[0], address[1]), timeout=min(remaining_s, 10.0)))
            except BadFrame as error:
                raise CommunicationError(
                    f"whoever answers at {address[0]}:{address[1]} is not rank {other} of this job: {error}",
                    hint="someone sits between the nodes, or an address belongs to another machine by now",
                ) from error
            except OSError:
                # It may be busy with strangers: tried again until the deadline.
                threading.Event().wait(min(_RETRY_S, max(0.0, remaining_s)))

    def _greet(self, raw: socket.socket) -> Connection:
        connection = self._proved(raw, is_server=False)
        try:
            connection.send(self._index)
            connection.receive()  # the other end has accepted
            connection.limit(None)
        except BaseException:
            connection.close()
            raise
        return connection

    def _accept(self, listener: socket.socket) -> None:
        places = threading.Semaphore(_MAX_STRANGERS)
        while True:
            try:
                raw, _ = listener.accept()
            except OSError:  # the group is complete, or has failed
                return
            if not places.acquire(blocking=False):
                raw.close()
                continue
            threading.Thread(target=self._question, args=(raw, places), name="torsh-tls-question", daemon=True).start()

    def _question(self, raw: socket.socket, places: threading.Semaphore) -> None:
        """Let a rank of the group in; a stranger is dropped without a word."""
        connection: Connection | None = None
        try:
            connection = self._proved(raw, is_server=True)
            other, _ = connection.receive()
            with self._joined:
                if other in self._incoming or other == self._index or other not in range(self._num_ranks):
                    raise BadFrame("it has the number of another rank")
                connection.send(True)
                connection.limit(None)
                self._incoming[other] = connection
                self._joined.notify_all()
        except OSError:
            if connection is not None:
                connection.close()
        finally:
            places.release()

    def _proved(self, raw: socket.socket, *, is_server: bool) -> Connection:
        proved = prove(raw, self._secret, _PROTOCOL, is_server=is_server, timeout_s=PROOF_TIMEOUT_S, tls=self._tls)
        return Connection(proved, _LIMITS, PROOF_TIMEOUT_S)

    def _await_all(self) -> None:
        def missing() -> list[int]:
            return [rank for rank in range(self._num_ranks) if rank != self._index and rank not in self._incoming]

        with self._joined:
            if not self._joined.wait_for(lambda: not missing(), max(0.0, self._deadline_s - time.monotonic())):
                raise OperationTimeout(f"ranks {missing()} of the group did not connect under TLS", operation="connect")

    # Moving bytes

    def _send(self, rank: int, key: MessageKey, body: memoryview) -> None:
        self._outgoing[rank].send(key, body)

    def _read(self, rank: int, connection: Connection) -> None:
        try:
            while True:
                key, body = connection.receive()
                self._mailbox.put(rank, MessageKey(*key), body)
        except (OSError, TypeError) as error:
            self._mailbox.lose(rank, error)
