"""Signed records over a socket, between the launchers of a job.

Both ends open with a magic word and 32 random bytes. From these and the job's token they derive a key for
this connection alone, so without the token a record can be neither forged, replayed nor reflected. A
record on the wire: length (4 bytes, big-endian), HMAC-SHA256 over direction, sequence number and body, body
(JSON). It is not encrypted: records contain no secret.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable

from torsh_distributed.errors import SerializationError
from torsh_distributed.launch.local.loop import Loop
from torsh_distributed.launch.nodes.records import Message, decode, encode

_MAGIC = b"TORSHL1\n"
_NONCE_BYTES = 32
_LENGTH = struct.Struct("!I")
_SEQUENCE = struct.Struct("!Q")
_MAC_BYTES = 32
_MAX_BODY_BYTES = 1 << 18
_READ_BYTES = 1 << 16


class BadRecord(Exception):
    """What arrived is not a record of a launcher that has the token; the connection must be closed."""


class RecordCodec:
    """Turns messages into signed bytes and back, for one end of one connection. Pure."""

    def __init__(self, token: str, *, is_server: bool) -> None:
        self._token = token.encode()
        self._ours, self._theirs = (b"s", b"c") if is_server else (b"c", b"s")
        self._is_server = is_server
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._key: bytes | None = None
        self._sent = 0
        self._received = 0
        self._buffer = bytearray()

    @property
    def greeting(self) -> bytes:
        """What must be sent first."""
        return _MAGIC + self._nonce

    @property
    def is_ready(self) -> bool:
        """Whether the other end's greeting has arrived, so records can be signed."""
        return self._key is not None

    def seal(self, message: Message) -> bytes:
        """The bytes of the next record; only once ready."""
        body = encode(message)
        data = _LENGTH.pack(len(body)) + self._mac(self._ours, self._sent, body) + body
        self._sent += 1
        return data

    def feed(self, data: bytes) -> list[Message]:
        """The records that `data` completes, all of them genuine; raises BadRecord at the first that is not."""
        self._buffer += data
        if self._key is None and not self._take_greeting():
            return []
        messages = []
        while (body := self._take_body()) is not None:
            try:
                messages.append(decode(body))
            except SerializationError as error:
                raise BadRecord(str(error)) from error
        return messages

    def _take_greeting(self) -> bool:
        if not _MAGIC.startswith(bytes(self._buffer[: len(_MAGIC)])):
            raise BadRecord("it is no torsh launcher")
        size = len(_MAGIC) + _NONCE_BYTES
        if len(self._buffer) < size:
            return False
        theirs = bytes(self._buffer[len(_MAGIC) : size])
        del self._buffer[:size]
        nonces = self._nonce + theirs if self._is_server else theirs + self._nonce
        self._key = hmac.digest(self._token, _MAGIC + nonces, hashlib.sha256)
        return True

    def _take_body(self) -> bytes | None:
        head = _LENGTH.size + _MAC_BYTES
        if len(self._buffer) < head:
            return None
        (length,) = _LENGTH.unpack(self._buffer[: _LENGTH.size])
        if length > _MAX_BODY_BYTES:
            raise BadRecord(f"a record of {length} bytes is too long")
        if len(self._buffer) < head + length:
            return None
        mac = bytes(self._buffer[_LENGTH.size : head])
        body = bytes(self._buffer[head : head + length])
        if not hmac.compare_digest(mac, self._mac(self._theirs, self._received, body)):
            raise BadRecord("its records are not signed with the token of this job")
        del self._buffer[: head + length]
        self._received += 1
        return body

    def _mac(self, direction: bytes, sequence: int, body: bytes) -> bytes:
        if self._key is None:
            raise BadRecord("a record before the greeting")
        return hmac.digest(self._key, direction + _SEQUENCE.pack(sequence) + body, hashlib.sha256)


class Connection:
    """One end of a connection, driven by the loop.

    `on_message` is called with every genuine record; `on_close` once, with the reason, when the other end is gone
    or sends something else, but not after `close`. Set both before the loop runs again.
    """

    def __init__(self, loop: Loop, sock: socket.socket, token: str, *, is_server: bool) -> None:
        self.on_message: Callable[[Message], None] = lambda _: None
        self.on_close: Callable[[str], None] = lambda _: None
        self.last_heard_s = time.monotonic()
        self._loop = loop
        self._sock = sock
        self._codec = RecordCodec(token, is_server=is_server)
        self._waiting: list[Message] = []
        self._outgoing = bytearray(self._codec.greeting)
        self._is_open = True
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop.watch(sock.fileno(), self._serve, writable=True)

    def send(self, message: Message) -> None:
        """Queue a record, to be sent as fast as the other end reads. Dropped if the connection is closed."""
        if not self._is_open:
            return
        self._waiting.append(message)
        self._seal_waiting()
        self._loop.watch(self._sock.fileno(), self._serve, writable=True)

    def _seal_waiting(self) -> None:
        if self._codec.is_ready:
            for message in self._waiting:
                self._outgoing += self._codec.seal(message)
            self._waiting = []

    def _serve(self) -> None:
        try:
            self._write()
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(error.strerror or str(error))
            return
        if not data:
            self._fail("it closed the connection")
            return
        self.last_heard_s = time.monotonic()
        try:
            messages = self._codec.feed(data)
        except BadRecord as error:
            self._fail(str(error))
            return
        self._seal_waiting()
        if self._outgoing:
            self._loop.watch(self._sock.fileno(), self._serve, writable=True)
        for message in messages:
            self.on_message(message)

    def _write(self) -> None:
        if self._outgoing:
            try:
                del self._outgoing[: self._sock.send(self._outgoing)]
            except BlockingIOError:
                return
        if not self._outgoing:
            self._loop.watch(self._sock.fileno(), self._serve)

    def _fail(self, reason: str) -> None:
        if self._is_open:
            self.close()
            self.on_close(reason)

    def finish(self, *, timeout_s: float) -> None:
        """Send what is queued, waiting at most `timeout_s`, then close."""
        deadline = time.monotonic() + timeout_s
        while self._is_open and self._outgoing:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or not select.select([], [self._sock], [], remaining_s)[1]:
                break
            try:
                self._write()
            except OSError:
                break
        self.close()

    def close(self) -> None:
        """Close at once; what is queued is dropped."""
        if self._is_open:
            self._is_open = False
            self._loop.unwatch(self._sock.fileno())
            self._sock.close()
