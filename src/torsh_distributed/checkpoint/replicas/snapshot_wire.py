"""Messages with a payload between two ranks, over a connection of their own: proved by a secret, checked by a hash.

::

    header length (4) | payload length (8) | header: MessagePack map | signature (32), if signed | payload

The header has the payload's hash: xxh3_128 between processes of one machine, SHA-256 across a network, where the header
is signed (see `comm.trust.handshake`), or everything is encrypted if the job is under TLS.
"""

from __future__ import annotations

import hashlib
import socket
import struct
from collections.abc import Callable
from typing import Any, Self

import msgpack
import xxhash

from torsh_distributed.comm.trust.handshake import HELLO_BYTES, MAC_BYTES, Handshake, NotAMember, Signer
from torsh_distributed.comm.trust.job_tls import find_tls
from torsh_distributed.comm.trust.socket_peers import is_same_machine
from torsh_distributed.comm.trust.tls_channel import encrypted

CHUNK_BYTES = 8 << 20
_MAGIC = b"TORSHREP"
_FRAME = struct.Struct("!IQ")
_MOST_HEADER_BYTES, _MOST_PAYLOAD_BYTES = 1 << 20, 1 << 34
TIMEOUT_S = 60.0
"""How long one message may take."""

Buffer = bytes | bytearray | memoryview


class SnapshotConnection:
    """One end of a connection. Errors are OSError; after one the connection is of no use."""

    def __init__(self, sock: socket.socket, handshake: Handshake) -> None:
        self._sock = sock
        signers = handshake.signers()
        self._outgoing: Signer | None = None if signers is None else signers[0]
        self._incoming: Signer | None = None if signers is None else signers[1]

    @classmethod
    def connect(cls, address: tuple[str, int], secret: bytes) -> Self:
        """Connect to another rank's server."""
        sock = socket.create_connection(address, timeout=TIMEOUT_S)
        return cls._greeted(sock, secret, is_server=False)

    @classmethod
    def accept(cls, sock: socket.socket, secret: bytes) -> Self:
        """Let another rank in, if it has the secret."""
        sock.settimeout(TIMEOUT_S)
        return cls._greeted(sock, secret, is_server=True)

    @classmethod
    def _greeted(cls, sock: socket.socket, secret: bytes, *, is_server: bool) -> Self:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            is_open = not is_same_machine(sock)
            tls = find_tls() if is_open else None
            if tls is not None:
                sock, secret = encrypted(sock, tls, secret, is_server=is_server)
            handshake = Handshake(secret, _MAGIC, is_server=is_server, wants_signing=is_open and tls is None)
            sock.sendall(handshake.opening)
            for length in (HELLO_BYTES, MAC_BYTES) if is_server else (HELLO_BYTES + MAC_BYTES,):
                data = bytearray(length)
                _receive(sock, memoryview(data))
                sock.sendall(handshake.feed(data))
        except NotAMember as error:
            sock.close()
            raise ConnectionRefusedError(str(error)) from error
        except BaseException:
            sock.close()
            raise
        return cls(sock, handshake)

    def send(self, header: dict[str, Any], payload: Buffer = b"") -> None:
        """Send a message."""
        text = msgpack.packb({**header, "hash": self._hash(payload)})
        signature = b"" if self._outgoing is None else self._outgoing.sign(text)
        self._sock.sendall(_FRAME.pack(len(text), len(payload)) + text + signature)
        self._sock.sendall(payload)

    def receive(
        self, place: Callable[[dict[str, Any], int], memoryview] | None = None, *, timeout_s: float | None = TIMEOUT_S
    ) -> tuple[dict[str, Any], memoryview]:
        """The next message; `place` says, from header and length, where its payload goes. None waits for ever."""
        frame = bytearray(_FRAME.size)
        self._sock.settimeout(timeout_s)
        _receive(self._sock, memoryview(frame))
        self._sock.settimeout(TIMEOUT_S)
        header_bytes, payload_bytes = _FRAME.unpack(frame)
        if header_bytes > _MOST_HEADER_BYTES or payload_bytes > _MOST_PAYLOAD_BYTES:
            raise ConnectionAbortedError("a message of an impossible size")
        text = bytearray(header_bytes)
        _receive(self._sock, memoryview(text))
        if self._incoming is not None:
            signature = bytearray(MAC_BYTES)
            _receive(self._sock, memoryview(signature))
            try:
                self._incoming.check(text, signature)
            except NotAMember as error:
                raise ConnectionAbortedError(str(error)) from error
        header: dict[str, Any] = msgpack.unpackb(text)
        payload = memoryview(bytearray(payload_bytes)) if place is None else place(header, payload_bytes)
        _receive(self._sock, payload)
        if self._hash(payload) != header.pop("hash"):
            raise ConnectionAbortedError("a payload arrived damaged")
        return header, payload

    def close(self) -> None:
        """Close it; the other end sees that."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other end was first
        finally:
            self._sock.close()

    def _hash(self, payload: Buffer) -> bytes:
        if self._outgoing is not None:
            return hashlib.sha256(payload).digest()
        return xxhash.xxh3_128_digest(payload)


def _receive(sock: socket.socket, into: memoryview) -> None:
    done = 0
    while done < len(into):
        count = sock.recv_into(into[done:])
        if count == 0:
            raise ConnectionResetError("the other rank closed the connection")
        done += count
