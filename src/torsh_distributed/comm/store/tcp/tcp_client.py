"""The store behind a TCP port or a Unix socket: the client side, and the server if this process hosts it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import NoReturn
from weakref import WeakSet

import torch.distributed as dist
from typing_extensions import override

from torsh_distributed.comm.store.keyspace import Keyspace, Swap
from torsh_distributed.comm.store.tcp import tcp_protocol
from torsh_distributed.comm.store.tcp.tcp_protocol import ADD, CHECK, DONE, GET, INVALID, SET, TcpField
from torsh_distributed.comm.store.tcp.tcp_server import TcpStoreServer, tcp_url
from torsh_distributed.comm.transport.frames import BadFrame
from torsh_distributed.comm.transport.proof import ProvedSocket, prove
from torsh_distributed.comm.trust.handshake import MAC_BYTES, NotAMember, Signer
from torsh_distributed.comm.trust.job_secret import is_same_machine, peer_uid
from torsh_distributed.comm.trust.job_tls import JobTls
from torsh_distributed.errors import CommunicationError, InvalidArgument, OperationTimeout, TorshError
from torsh_distributed.plan.sections.recovery import RetryConfig
from torsh_distributed.retry import retry

# A server that does not answer for this long after a wait should have ended is stuck or cut off.
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.02, 0.5
_GRACE_S = 5.0
_RECEIVE_BYTES = 2**16
_LARGE_RECEIVE_BYTES = 2**20
# The kernel counts socket timeouts in 31 bits of milliseconds.
_LONGEST_SOCKET_WAIT_S = 2e6
# A connection used this recently is not asked whether it is still there.
_FRESH_S = 0.0002
_GREETING_TIMEOUT_S = 5.0
_TIMEVAL = struct.Struct("ll")
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - compared with, not bound to
_HEADER_BYTES = tcp_protocol.FRAME_HEADER.size

StoreAddress = tuple[str, int] | str
"""Host and port, or the path of a Unix socket."""


class StoreLost(CommunicationError, dist.DistNetworkError):
    """The store's server is gone. Also a DistNetworkError, which is how c10d's own stores report it."""


class StoreRefused(CommunicationError):
    """What answers at the store's address is not the store of this job, or does not let this client in; retried."""


class TcpKeyspace(Keyspace):
    """Keys in a server, over one connection that keeps requests in order.

    A thread that waits for keys has a connection to itself: the only one, until another thread asks something
    meanwhile and opens a second. So a world of thousands joins with one connection for each rank.

    Writes have no reply, as in torch's TCPStore: they take no round trip, and what the same client asks next comes
    after them. A lost connection is replaced at the next call. A call during which it is lost raises CommunicationError
    and may or may not have taken effect: only the caller knows whether repeating it is safe. Reading is repeated as
    `policy` says.
    """

    def __init__(
        self,
        address: StoreAddress,
        *,
        timeout_s: float,
        is_server: bool = False,
        token: str | None = None,
        policy: RetryConfig | None = None,
        tls: JobTls | None = None,
    ) -> None:
        self._policy = policy or RetryConfig()
        self._tls = None if tls is None else (tls, tls.client_context())
        self._server: TcpStoreServer | None = None
        if not isinstance(address, str):
            host, port = address
            if is_server:
                self._server = TcpStoreServer(host, port, token=token, tls=tls)
                host, port = _ANY_ADDRESS.get(host, host), self._server.port
            address = (host, port)
        self._address = address
        self._name = address if isinstance(address, str) else f"{address[0]}:{address[1]}"
        self.url = f"unix://{address}" if isinstance(address, str) else tcp_url(*address)
        self._secret = (token or "").encode()
        self._timeout_s = timeout_s
        self._mutex = threading.Lock()
        self._main: _StoreConnection | None = None
        self._idle: list[_StoreConnection] = []
        self._open: WeakSet[_StoreConnection] = WeakSet()
        self._is_cut = False
        self._pid = os.getpid()
        try:
            self._main = self._connect_patiently()
        except TorshError:
            self.close()
            raise

    @override
    def set(self, key: str, value: bytes, ttl_s: float | None) -> None:
        name = key.encode()
        if ttl_s is None:
            self._ask(tcp_protocol.KEY_HEADER.pack(SET, len(name)) + name + value, has_reply=False)
        else:
            self._fields(b"set", name, value, tcp_protocol.number(ttl_s))

    @override
    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        try:
            return self._get(keys)
        except StoreLost:
            return retry(self._policy)(self._get)(keys)

    def _get(self, keys: Sequence[str]) -> list[bytes | None]:
        if len(keys) == 1:
            reply = self._ask(GET + keys[0].encode())
            return [reply[1:] if reply[:1] == DONE else None]
        return self._fields(b"get", *[key.encode() for key in keys])

    @override
    def delete(self, key: str) -> bool:
        return self._fields(b"delete", key.encode()) == [b"1"]

    @override
    def compare_and_swap(self, key: str, expected: bytes | None, desired: bytes, ttl_s: float | None) -> Swap:
        swapped, value = self._fields(b"cas", key.encode(), expected, desired, tcp_protocol.number(ttl_s))
        return Swap(swapped == b"1", value)

    @override
    def add(self, key: str, delta: int) -> int:
        return int(_accepted(self._ask(tcp_protocol.ADD_HEADER.pack(ADD, delta) + key.encode()), self.url))

    @override
    def append(self, key: str, suffix: bytes) -> None:
        self._fields(b"append", key.encode(), suffix)

    @override
    def wait(self, keys: Sequence[str], timeout_s: float) -> list[str]:
        if timeout_s <= 0 and len(keys) == 1:
            return [] if self._ask(CHECK + keys[0].encode()) == DONE else list(keys)
        names = [key.encode() for key in keys]
        if timeout_s > 0:
            missing = self._wait(names, timeout_s)
        else:
            missing = self._fields(b"wait", tcp_protocol.number(0.0), *names)
        return [name.decode() for name in missing if name is not None]

    @override
    def count(self, prefix: str) -> int:
        try:
            (number,) = self._fields(b"count", prefix.encode())
        except StoreLost:
            (number,) = retry(self._policy)(self._fields)(b"count", prefix.encode())
        return int(number or b"0")

    @override
    def close(self) -> None:
        with self._mutex:
            for connection in (*self._idle, *filter(None, [self._main])):
                connection.close()
            self._idle.clear()
            self._main = None
        if self._server is not None:
            self._server.close()

    @override
    def cut(self) -> None:
        # Without the mutex: a call that waits for a reply holds it.
        self._is_cut = True
        for connection in list(self._open):
            connection.cut()

    def _fields(self, op: bytes, *args: TcpField) -> list[TcpField]:
        return _decoded(self._ask(_request(op, args)), self.url)

    def _ask(self, request: bytes, *, has_reply: bool = True) -> bytes:
        """Send a request on the connection that keeps the order, and return the reply."""
        self._notice_fork()
        with self._mutex:
            connection, self._main = self._main, None
            if connection is None or not connection.is_usable(can_trust=True):
                if connection is not None:
                    connection.close()
                connection = self._take_idle() or self._connect_again_if_refused()
            try:
                reply = connection.ask(request) if has_reply else connection.tell(request)
            except BaseException as error:
                connection.close()
                _raise_explained(request, error, self.url)
            self._main = connection
            return reply

    def _wait(self, names: list[bytes], timeout_s: float) -> list[TcpField]:
        """Wait on a connection that no other thread uses meanwhile."""
        request = _request(b"wait", (tcp_protocol.number(timeout_s), *names))
        self._notice_fork()
        with self._mutex:
            connection = self._take_idle()
            if connection is None and self._main is not None and self._main.is_usable():
                connection, self._main = self._main, None
        connection = connection or self._connect_again_if_refused()
        try:
            if connection.has_unanswered:
                # What other threads ask meanwhile goes over another connection and must not overtake these writes.
                connection.ask(_request(b"flush", ()))
            connection.limit(timeout_s + _GRACE_S)
            reply = connection.ask(request)
            connection.limit(self._timeout_s)
        except BaseException as error:
            connection.close()
            _raise_explained(request, error, self.url)
        with self._mutex:
            if self._main is None:
                self._main = connection
            else:
                self._idle.append(connection)
        return _decoded(reply, self.url)

    def _take_idle(self) -> _StoreConnection | None:
        """A connection that nobody uses, if there is one; the mutex is held."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable():
                return connection
            connection.close()
        return None

    def _connect_again_if_refused(self) -> _StoreConnection:
        """A further connection. The server turns some away while hundreds of ranks connect at once: they try again."""
        deadline = time.monotonic() + self._timeout_s
        pause, pause_s = threading.Event(), _FIRST_PAUSE_S
        while True:
            try:
                return self._connect(deadline)
            except StoreRefused:
                if time.monotonic() + pause_s > deadline:
                    raise
            pause.wait(pause_s)
            pause_s = min(_LAST_PAUSE_S, pause_s * 1.5)

    def _notice_fork(self) -> None:
        """After a fork the parent still uses these sockets; two processes must not share one."""
        if self._pid != os.getpid():
            self._pid, self._main, self._idle, self._mutex = os.getpid(), None, [], threading.Lock()

    def _connect_patiently(self) -> _StoreConnection:
        """The first connection, retried: the server may still be starting, or busy with strangers."""
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
        if self._is_cut:
            raise StoreLost("this client of the store was cut off", operation="connect", store=self.url)
        try:
            sock = _open_socket(self._address, _remaining_s(deadline))
        except OSError as error:
            raise StoreLost(
                f"no store answers at {self._name}: {error.strerror or error}",
                hint="start it (`torsh store serve`, or is_server=True on one rank) or correct the address",
                operation="connect",
                store=self.url,
            ) from error
        try:
            tls, context = (None, None) if self._tls is None or is_same_machine(sock) else self._tls
            limit_s = min(_remaining_s(deadline), _GREETING_TIMEOUT_S)
            proved = prove(
                sock, self._secret, tcp_protocol.MAGIC, is_server=False, timeout_s=limit_s, tls=tls, context=context
            )
            connection = _StoreConnection(proved, self._timeout_s)
            self._open.add(connection)
            connection.ask(_request(b"flush", ()))  # answered only to a client that was let in
            return connection
        except OSError as error:
            sock.close()
            raise self._not_let_in(error) from error

    def _not_let_in(self, error: OSError) -> TorshError:
        if isinstance(error, TimeoutError | BlockingIOError):
            return OperationTimeout(
                f"the service at {self._name} did not greet like a torsh store",
                hint="it may be stopped or overloaded, or a different service: a plain torch TCPStore never answers",
                operation="connect",
                store=self.url,
                timeout_s=self._timeout_s,
            )
        if not isinstance(error, BadFrame):
            return StoreRefused(
                f"the service at {self._name} closed the connection without a greeting",
                hint="it may have too many clients without the token, or not be a torsh store; give all the same token",
                operation="connect",
                store=self.url,
                reason=error.strerror or str(error),
            )
        if "secret" in str(error):
            return InvalidArgument(
                "the store has a different token than this client",
                hint="give all processes of the job the same token",
                store=self.url,
            )
        return InvalidArgument(
            f"the service at {self._name} is not a torsh store",
            hint="correct the address, or start a store there with `torsh store serve`",
            store=self.url,
            reason=str(error),
        )


class _StoreConnection:
    """One greeted socket, used by one thread at a time. The kernel keeps its time limit: one system call per step."""

    def __init__(self, proved: ProvedSocket, timeout_s: float) -> None:
        sock, signers = proved
        self._sock = sock
        self._sending: Signer | None = signers[0] if signers else None
        self._receiving: Signer | None = signers[1] if signers else None
        self._overhead = _HEADER_BYTES + (MAC_BYTES if signers else 0)
        self._used_s = time.monotonic()
        self.has_unanswered = False
        """Whether requests without a reply may still be on their way."""
        self._is_tls = _is_tls(sock)
        sock.settimeout(None)
        self.limit(timeout_s)

    def limit(self, timeout_s: float) -> None:
        """How long a reply may take from now on."""
        if self._is_tls:
            # Python's TLS tries again when the kernel's own limit ends a read.
            self._sock.settimeout(min(max(timeout_s, 1e-3), _LONGEST_SOCKET_WAIT_S))
            return
        fraction, whole = math.modf(min(max(timeout_s, 1e-3), _LONGEST_SOCKET_WAIT_S))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(whole), int(fraction * 1e6)))

    def tell(self, body: bytes) -> bytes:
        """Send a request that has no reply."""
        self._sock.sendall(tcp_protocol.frame(body, self._sending))
        self._used_s = time.monotonic()
        self.has_unanswered = True
        return b""

    def ask(self, body: bytes) -> bytes:
        """Send a request and return the reply's body."""
        self._sock.sendall(tcp_protocol.frame(body, self._sending))
        data: bytes | bytearray = self._receive(_RECEIVE_BYTES)
        while len(data) < self._overhead:
            data += self._receive(_RECEIVE_BYTES)
        (num_bytes,) = tcp_protocol.FRAME_HEADER.unpack_from(data)
        end = self._overhead + num_bytes
        if len(data) < end:
            data = bytearray(data)
            while len(data) < end:
                data += self._receive(min(_LARGE_RECEIVE_BYTES, end - len(data)))
        reply = bytes(data[self._overhead :])
        if len(data) > end:
            raise ValueError("the server sent more than was asked for")
        if self._receiving is not None:
            self._receiving.check(data[_HEADER_BYTES : self._overhead], reply)
        self._used_s = time.monotonic()
        self.has_unanswered = False
        return reply

    def _receive(self, num_bytes: int) -> bytes:
        data = self._sock.recv(num_bytes)
        if not data:
            raise ConnectionResetError("the server closed the connection")
        return data

    def is_usable(self, *, can_trust: bool = False) -> bool:
        """Whether the server has neither closed the connection nor sent anything since the last reply.

        `can_trust` leaves the question out right after another use: a burst of requests is not slowed down by it.
        """
        if can_trust and time.monotonic() - self._used_s < _FRESH_S:
            return True
        if self._is_tls:
            # A server sends nothing unasked, so what can be read is its end.
            return not select.select([self._sock], [], [], 0)[0]
        try:
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def cut(self) -> None:
        """From another thread: what waits for a reply returns at once."""
        with contextlib.suppress(OSError):  # closed, or never connected
            # Of the socket itself: TLS's own would let a later read go on in the clear.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()


def _open_socket(address: StoreAddress, timeout_s: float) -> socket.socket:
    if not isinstance(address, str):
        sock = socket.create_connection(address, timeout=timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(address)
        if peer_uid(sock) not in (os.geteuid(), 0):
            raise PermissionError(f"{address} belongs to another user")
    except OSError:
        sock.close()
        raise
    return sock


def _is_tls(sock: socket.socket) -> bool:
    return hasattr(sock, "do_handshake")


def _remaining_s(deadline: float) -> float:
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError("the deadline has passed")
    return min(remaining_s, _LONGEST_SOCKET_WAIT_S)


def _raise_explained(request: bytes, error: BaseException, url: str) -> NoReturn:
    """Raise what a caller can use, in place of what the socket said."""
    short = {SET: "set", GET: "get", ADD: "add", CHECK: "check"}
    op = short.get(request[:1]) or (tcp_protocol.decode(request[1:])[0] or b"").decode()
    if isinstance(error, BlockingIOError | TimeoutError):
        raise OperationTimeout(
            "the store's server accepted the request and did not answer in time",
            hint="the process that hosts the store may be stopped or overloaded; or raise the timeout for large values",
            operation=op,
            store=url,
        ) from error
    if isinstance(error, OSError | ValueError | NotAMember):
        raise StoreLost(
            "the connection to the store was lost; the operation may or may not have taken effect",
            hint="check whether the process that hosts the store has ended",
            operation=op,
            store=url,
            reason=str(error),
        ) from error
    raise error


def _request(op: bytes, args: Sequence[TcpField]) -> bytes:
    return tcp_protocol.FIELDS + tcp_protocol.encode([op, *args])


def _decoded(reply: bytes, url: str) -> list[TcpField]:
    return tcp_protocol.decode(_accepted(reply, url))


def _accepted(reply: bytes, url: str) -> bytes:
    """What the reply holds; raises InvalidArgument if the server refused the request."""
    if reply[:1] == INVALID:
        refusal = json.loads(reply[1:])
        raise InvalidArgument(refusal["message"], hint=refusal["hint"], **refusal["context"], store=url)
    return reply[1:]
