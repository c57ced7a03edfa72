"""Encrypted connections between the ranks of a group, and messages over them by key.

Each rank connects to every other; a connection carries messages one way, because Python's TLS does not read and write
at the same time. A reader per connection takes messages as they come, so a sender never waits for the other end's own
sending, and keeps them under (rank, key) until somebody takes them.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from torsh_distributed.comm.serial_thread import SerialThread
from torsh_distributed.comm.trust.handshake import HELLO_BYTES, MAC_BYTES, Handshake, NotAMember
from torsh_distributed.comm.trust.job_tls import JobTls, bound_secret
from torsh_distributed.comm.trust.stranger_pool import PROOF_TIMEOUT_S
from torsh_distributed.comm.trust.tls_channel import certificate_digest
from torsh_distributed.errors import CommunicationError, OperationTimeout

_MAGIC = b"TORSHDT1"
_INDEX = struct.Struct("!I")
_HEADER = struct.Struct("!BqqQ")
_MAX_STRANGERS = 32
_RETRY_S = 0.1


class MessageKey(NamedTuple):
    """Which message of a rank: of a collective (its number, the part) or between two ranks (their tag)."""

    is_collective: bool
    number: int
    part: int = 0


Taker = Callable[[bytearray | Exception], None]


class _Mailbox:
    """Messages that have arrived, and those who wait for one; first come, first served."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._arrived: dict[tuple[int, MessageKey], deque[bytearray]] = {}
        self._takers: dict[tuple[int, MessageKey], deque[Taker]] = {}
        self._lost: dict[int, Exception] = {}

    def put(self, rank: int, key: MessageKey, body: bytearray) -> None:
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

    def take(self, rank: int, key: MessageKey, deadline_s: float) -> bytearray:
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
            body: bytearray | Exception | None = self._pop((rank, key))
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

    def _pop(self, place: tuple[int, MessageKey]) -> bytearray | None:
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
        self._secret, self._own_secret = secret, bound_secret(secret, tls.own_digest())
        self._server, self._client = tls.server_context(), tls.client_context()
        self._mailbox = _Mailbox()
        self._incoming: dict[int, ssl.SSLSocket] = {}
        self._outgoing: dict[int, ssl.SSLSocket] = {}
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
        for other, sock in self._incoming.items():
            threading.Thread(target=self._read, args=(other, sock), name=f"torsh-tls-read-{other}", daemon=True).start()

    def send(self, rank: int, key: MessageKey, body: memoryview) -> Future[None]:
        """Send after everything that was sent to that rank before; the memory must stay until the future is done."""
        return self._senders[rank].submit(self._send, rank, key, body)

    def take(self, rank: int, key: MessageKey, deadline_s: float) -> bytearray:
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
        for sock in (*self._incoming.values(), *self._outgoing.values()):
            with contextlib.suppress(OSError):  # closed already
                # Of the socket itself: TLS's own would let a later call go on in the clear.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    # Connecting

    def _connect(self, other: int, address: tuple[str, int]) -> ssl.SSLSocket:
        while True:
            remaining_s = self._deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise OperationTimeout(
                    f"rank {other} of the group could not be reached under TLS at {address[0]}:{address[1]}",
                    operation="connect",
                )
            try:
                return self._greet(socket.create_connection((address[0], address[1]), timeout=min(remaining_s, 10.0)))
            except NotAMember as error:
                raise CommunicationError(
                    f"whoever answers at {address[0]}:{address[1]} is not rank {other} of this job: {error}",
                    hint="someone sits between the nodes, or an address belongs to another machine by now",
                ) from error
            except OSError:
                # It may be busy with strangers: tried again until the deadline.
                threading.Event().wait(min(_RETRY_S, max(0.0, remaining_s)))

    def _greet(self, raw: socket.socket) -> ssl.SSLSocket:
        try:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock = self._client.wrap_socket(raw)
        except BaseException:
            raw.close()
            raise
        try:
            secret = bound_secret(self._secret, certificate_digest(sock))
            handshake = Handshake(secret, _MAGIC, is_server=False, wants_signing=False)
            sock.sendall(handshake.opening)
            sock.sendall(handshake.feed(_receive(sock, HELLO_BYTES + MAC_BYTES)) + _INDEX.pack(self._index))
            _receive(sock, 1)  # the other end has accepted
            sock.settimeout(None)
        except BaseException:
            sock.close()
            raise
        return sock

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
        sock: socket.socket = raw
        try:
            raw.settimeout(PROOF_TIMEOUT_S)
            sock = channel = self._server.wrap_socket(raw, server_side=True)
            handshake = Handshake(self._own_secret, _MAGIC, is_server=True, wants_signing=False)
            channel.sendall(handshake.feed(_receive(channel, HELLO_BYTES)))
            handshake.feed(_receive(channel, MAC_BYTES))
            (other,) = _INDEX.unpack(_receive(channel, _INDEX.size))
            with self._joined:
                if other in self._incoming or other == self._index or other >= self._num_ranks:
                    raise NotAMember("it has the number of another rank")
                channel.sendall(b"+")
                channel.settimeout(None)
                self._incoming[other] = channel
                self._joined.notify_all()
        except (OSError, NotAMember):
            sock.close()
        finally:
            places.release()

    def _await_all(self) -> None:
        def missing() -> list[int]:
            return [rank for rank in range(self._num_ranks) if rank != self._index and rank not in self._incoming]

        with self._joined:
            if not self._joined.wait_for(lambda: not missing(), max(0.0, self._deadline_s - time.monotonic())):
                raise OperationTimeout(f"ranks {missing()} of the group did not connect under TLS", operation="connect")

    # Moving bytes

    def _send(self, rank: int, key: MessageKey, body: memoryview) -> None:
        sock = self._outgoing[rank]
        sock.sendall(_HEADER.pack(key.is_collective, key.number, key.part, len(body)))
        if len(body):
            sock.sendall(body)

    def _read(self, rank: int, sock: ssl.SSLSocket) -> None:
        try:
            while True:
                is_collective, number, part, num_bytes = _HEADER.unpack(_receive(sock, _HEADER.size))
                body = _receive(sock, num_bytes)
                self._mailbox.put(rank, MessageKey(bool(is_collective), number, part), body)
        except (OSError, ValueError) as error:
            self._mailbox.lose(rank, error)


def _receive(sock: ssl.SSLSocket, num_bytes: int) -> bytearray:
    body = bytearray(num_bytes)
    view = memoryview(body)
    while view:
        num_read = sock.recv_into(view)
        if not num_read:
            raise ConnectionResetError("the connection was closed")
        view = view[num_read:]
    return body
