"""One end of a connection for a thread that waits: heads are MessagePack, payloads go from and to their own memory."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Any, Self

import msgpack

from torsh_distributed.comm.transport.frames import LENGTHS_BYTES, BadFrame, Buffer, FrameLimits, Frames
from torsh_distributed.comm.transport.proof import ProvedSocket, prove, receive_into, tls_beyond

Address = str | tuple[str, int]
"""The name of a Unix socket, or a host and port."""
Place = Callable[[Any, int], memoryview]
"""Where a payload goes: called with the head and the payload's bytes, before any of them is read."""


class Connection:
    """One end. Errors are OSError; after one the connection is of no use. One thread sends, one receives."""

    def __init__(self, proved: ProvedSocket, limits: FrameLimits, timeout_s: float | None) -> None:
        self._sock = proved.sock
        self._frames = Frames(proved.signers, limits)
        self._timeout_s = timeout_s
        self._sock.settimeout(timeout_s)

    @classmethod
    def connect(
        cls, address: Address, secret: bytes, protocol: bytes, *, limits: FrameLimits, timeout_s: float
    ) -> Self:
        """Connect to a listener of the job; TLS where the job has it and the connection leaves this machine."""
        sock = open_socket(address, timeout_s)
        return cls(_proved(sock, secret, protocol, timeout_s, is_server=False), limits, timeout_s)

    @classmethod
    def accept(
        cls, sock: socket.socket, secret: bytes, protocol: bytes, *, limits: FrameLimits, timeout_s: float
    ) -> Self:
        """Let the other end of an accepted socket in, if it has the secret."""
        return cls(_proved(sock, secret, protocol, timeout_s, is_server=True), limits, timeout_s)

    def limit(self, timeout_s: float | None) -> None:
        """How long a message may take from now on; None for ever."""
        self._timeout_s = timeout_s
        self._sock.settimeout(timeout_s)

    def fileno(self) -> int:
        """For polling."""
        return self._sock.fileno()

    def send(self, head: Any, *parts: Buffer) -> None:
        """Send a plain value and, as its payload, these parts. Returns when the kernel has all of it."""
        send_parts(self._sock, self._frames.seal(msgpack.packb(head), parts))

    def receive(self, place: Place | None = None, *, waits: bool = False) -> tuple[Any, memoryview]:
        """The next head and its payload, which is in memory of its own unless `place` says where it goes.

        With `waits` the frame may begin at any time; what has begun must arrive within the connection's timeout.
        """
        prefix = bytearray(LENGTHS_BYTES)
        if waits:
            self._sock.settimeout(None)
            receive_into(self._sock, memoryview(prefix)[:1])
            self._sock.settimeout(self._timeout_s)
            receive_into(self._sock, memoryview(prefix)[1:])
        else:
            receive_into(self._sock, memoryview(prefix))
        num_head, num_payload = self._frames.lengths(prefix)
        signed = bytearray(num_head + self._frames.signature_bytes)
        receive_into(self._sock, memoryview(signed))
        self._frames.check_head(prefix, signed[:num_head], signed[num_head:])
        try:
            head = msgpack.unpackb(memoryview(signed)[:num_head])
        except (ValueError, msgpack.UnpackException) as error:
            raise BadFrame(f"a head that cannot be read: {error}") from error
        payload = memoryview(bytearray(num_payload)) if place is None else place(head, num_payload)
        if len(payload) != num_payload:
            raise BadFrame(f"a payload of {num_payload} bytes where {len(payload)} were expected")
        if num_payload:
            receive_into(self._sock, payload)
            signature = bytearray(self._frames.signature_bytes)
            receive_into(self._sock, memoryview(signature))
            self._frames.check_payload(signature, payload)
        return head, payload

    def cut(self) -> None:
        """From any thread: who waits on either end is woken with an error."""
        with contextlib.suppress(OSError):  # the other end was first
            # Of the socket itself: TLS's own would let a later call go on in the clear.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Cut it, and give the socket back."""
        self.cut()
        self._sock.close()


def _proved(sock: socket.socket, secret: bytes, protocol: bytes, timeout_s: float, *, is_server: bool) -> ProvedSocket:
    return prove(sock, secret, protocol, is_server=is_server, timeout_s=timeout_s, tls=tls_beyond(sock))


def open_socket(address: Address, timeout_s: float) -> socket.socket:
    """A socket connected to the address."""
    if not isinstance(address, str):
        return socket.create_connection(address, timeout=timeout_s)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock


def send_parts(sock: socket.socket, parts: list[Buffer]) -> None:
    """Send them all, with one call of the kernel where it takes them."""
    if len(parts) == 1 or not _gathers(sock):
        for part in parts:
            sock.sendall(part)
        return
    views = [memoryview(part) for part in parts]
    while views:
        num_sent = sock.sendmsg(views[:_MOST_PARTS])
        while views and num_sent >= len(views[0]):
            num_sent -= len(views.pop(0))
        if num_sent:
            views[0] = views[0][num_sent:]


_MOST_PARTS = 64
"""Fewer than every system's limit of one call."""


def _gathers(sock: socket.socket) -> bool:
    """Whether it takes several parts in one call: TLS does not."""
    return not hasattr(sock, "do_handshake")
