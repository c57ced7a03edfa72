"""The store behind a TCP port: the client side, and the server if this process hosts it."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence

from typing_extensions import override

from torsh_distributed.comm.store import tcp_protocol
from torsh_distributed.comm.store.keyspace import Keyspace, Swap
from torsh_distributed.comm.store.tcp_server import TcpStoreServer, tcp_url
from torsh_distributed.errors import CommunicationError, InvalidArgument, OperationTimeout, TorshError
from torsh_distributed.plan.sections.retry import RetryConfig
from torsh_distributed.retry import retry

# A server that does not answer for this long after a wait should have ended is stuck or cut off.
_GRACE_S = 5.0
_RECEIVE_BYTES = 2**20
# The kernel counts socket timeouts in 31 bits of milliseconds.
_LONGEST_SOCKET_WAIT_S = 2e6
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - compared with, not bound to


class TcpKeyspace(Keyspace):
    """Keys in a `TcpStoreServer`, reached over a pool of connections: a waiting thread has one to itself.

    A lost connection is replaced at the next call. A call during which it is lost raises CommunicationError and
    may or may not have taken effect: only the caller knows whether repeating it is safe.
    """

    def __init__(
        self, host: str, port: int, *, timeout_s: float, is_server: bool = False, token: str | None = None
    ) -> None:
        self._server = TcpStoreServer(host, port, token=token) if is_server else None
        self._host = _ANY_ADDRESS.get(host, host) if is_server else host
        self._port = self._server.port if self._server else port
        self.url = tcp_url(self._host, self._port)
        self._token = token
        self._timeout_s = timeout_s
        self._mutex = threading.Lock()
        self._idle: list[_StoreConnection] = []
        self._pid = os.getpid()
        try:
            self._give_back(self._connect_patiently())
        except TorshError:
            self.close()
            raise

    @override
    def set(self, key: str, value: bytes, ttl_s: float | None) -> None:
        self._call(b"set", key.encode(), value, tcp_protocol.number(ttl_s))

    @override
    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        return self._call(b"get", *[key.encode() for key in keys])

    @override
    def delete(self, key: str) -> bool:
        return self._call(b"delete", key.encode()) == [b"1"]

    @override
    def compare_and_swap(self, key: str, expected: bytes | None, desired: bytes, ttl_s: float | None) -> Swap:
        swapped, value = self._call(b"cas", key.encode(), expected, desired, tcp_protocol.number(ttl_s))
        return Swap(swapped == b"1", value)

    @override
    def add(self, key: str, delta: int) -> int:
        return _integer(self._call(b"add", key.encode(), tcp_protocol.number(delta)))

    @override
    def append(self, key: str, suffix: bytes) -> None:
        self._call(b"append", key.encode(), suffix)

    @override
    def wait(self, keys: Sequence[str], timeout_s: float) -> list[str]:
        names = [key.encode() for key in keys]
        missing = self._call(b"wait", tcp_protocol.number(timeout_s), *names, timeout_s=timeout_s + _GRACE_S)
        return [name.decode() for name in missing if name is not None]

    @override
    def count(self, prefix: str) -> int:
        return _integer(self._call(b"count", prefix.encode()))

    @override
    def close(self) -> None:
        with self._mutex:
            for connection in self._idle:
                connection.close()
            self._idle.clear()
        if self._server is not None:
            self._server.close()

    def _call(
        self, op: bytes, *args: tcp_protocol.TcpField, timeout_s: float | None = None
    ) -> list[tcp_protocol.TcpField]:
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        connection = self._take(deadline)
        try:
            status, *reply = connection.exchange([op, *args], deadline)
        except BaseException as error:
            connection.close()
            if isinstance(error, TimeoutError):
                raise self._stuck(op) from error
            if isinstance(error, OSError | ValueError):
                raise self._lost(op, error) from error
            raise
        self._give_back(connection)
        if status == b"invalid":
            refusal = json.loads(reply[0] or b"{}")
            raise InvalidArgument(refusal["message"], hint=refusal["hint"], **refusal["context"], store=self.url)
        return reply

    def _take(self, deadline: float) -> _StoreConnection:
        with self._mutex:
            if self._pid != os.getpid():
                # After a fork the parent still uses these sockets; two processes must not share one.
                self._pid, self._idle = os.getpid(), []
            while self._idle:
                connection = self._idle.pop()
                if connection.is_usable():
                    return connection
                connection.close()
        return self._connect(deadline)

    def _give_back(self, connection: _StoreConnection) -> None:
        with self._mutex:
            self._idle.append(connection)

    def _connect_patiently(self) -> _StoreConnection:
        """The first connection, retried: the server may still be starting."""
        deadline = time.monotonic() + self._timeout_s
        policy = RetryConfig(
            max_retries=1_000_000,
            initial_delay_s=0.02,
            multiplier=1.5,
            max_delay_s=0.5,
            total_timeout_s=max(self._timeout_s, 1e-3),
        )
        return retry(policy)(self._connect)(deadline)

    def _connect(self, deadline: float) -> _StoreConnection:
        try:
            sock = socket.create_connection((self._host, self._port), timeout=_remaining_s(deadline))
        except OSError as error:
            raise CommunicationError(
                f"no store answers at {self._host}:{self._port}: {error.strerror or error}",
                hint="start it (`torsh store serve`, or is_server=True on one rank) or correct the address",
                operation="connect",
                store=self.url,
            ) from error
        connection = _StoreConnection(sock)
        try:
            has_token = connection.greet(self._token, deadline)
        except TimeoutError as error:
            connection.close()
            raise OperationTimeout(
                f"the service at {self._host}:{self._port} did not greet like a torsh store",
                hint="it may be stopped or overloaded, or a different service: a plain torch TCPStore never answers",
                operation="connect",
                store=self.url,
                timeout_s=self._timeout_s,
            ) from error
        except (OSError, ValueError) as error:
            connection.close()
            raise InvalidArgument(
                f"the service at {self._host}:{self._port} is not a torsh store",
                hint="correct the address, or start a store there with `torsh store serve`",
                store=self.url,
                reason=str(error),
            ) from error
        if not has_token:
            connection.close()
            raise InvalidArgument(
                "the store has a different token than this client",
                hint="give all processes of the job the same token",
                store=self.url,
            )
        return connection

    def _stuck(self, op: bytes) -> OperationTimeout:
        return OperationTimeout(
            "the store's server accepted the request and did not answer in time",
            hint="the process that hosts the store may be stopped or overloaded; or raise the timeout for large values",
            operation=op.decode(),
            store=self.url,
        )

    def _lost(self, op: bytes, error: Exception) -> CommunicationError:
        return CommunicationError(
            "the connection to the store was lost; the operation may or may not have taken effect",
            hint="check whether the process that hosts the store has ended",
            operation=op.decode(),
            store=self.url,
            reason=str(error),
        )


class _StoreConnection:
    """One greeted socket, used by one thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock

    def greet(self, token: str | None, deadline: float) -> bool:
        """Exchange proofs; False if the server has a different token."""
        ours = secrets.token_bytes(tcp_protocol.NONCE_BYTES)
        self._send(tcp_protocol.MAGIC + ours, deadline)
        if self._receive(len(tcp_protocol.MAGIC), deadline) != tcp_protocol.MAGIC:
            raise ValueError("it speaks a different protocol")
        nonces = ours + self._receive(tcp_protocol.NONCE_BYTES, deadline)
        if not hmac.compare_digest(
            self._receive(tcp_protocol.PROOF_BYTES, deadline), tcp_protocol.proof(token, "server", nonces)
        ):
            return False
        self._send(tcp_protocol.proof(token, "client", nonces), deadline)
        return True

    def exchange(self, request: list[tcp_protocol.TcpField], deadline: float) -> list[tcp_protocol.TcpField]:
        """Send a request and return the reply's fields."""
        self._send(tcp_protocol.encode(request), deadline)
        (num_bytes,) = tcp_protocol.FRAME_HEADER.unpack(self._receive(tcp_protocol.FRAME_HEADER.size, deadline))
        return tcp_protocol.decode(self._receive(num_bytes, deadline))

    def is_usable(self) -> bool:
        """Whether the server has neither closed the connection nor sent anything since the last reply."""
        self._sock.settimeout(0)
        try:
            self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def close(self) -> None:
        self._sock.close()

    def _send(self, data: bytes, deadline: float) -> None:
        self._sock.settimeout(_remaining_s(deadline))
        self._sock.sendall(data)

    def _receive(self, num_bytes: int, deadline: float) -> bytearray:
        data = bytearray()
        while len(data) < num_bytes:
            self._sock.settimeout(_remaining_s(deadline))
            piece = self._sock.recv(min(_RECEIVE_BYTES, num_bytes - len(data)))
            if not piece:
                raise ConnectionResetError("the server closed the connection")
            data += piece
        return data


def _remaining_s(deadline: float) -> float:
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError("the deadline has passed")
    return min(remaining_s, _LONGEST_SOCKET_WAIT_S)


def _integer(reply: list[tcp_protocol.TcpField]) -> int:
    (number,) = reply
    return int(number or b"0")
