"""Signed records over a socket, between the launchers of a job.

A record is JSON in a frame of `comm.transport`, signed on every connection: without the secret it can be neither
forged, replayed nor reflected. It is not encrypted, as records contain no secret, unless the job asks for TLS: then the
proof is bound to the certificate of the leader (see `comm.trust.job_tls`).
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from torsh_distributed.comm.transport.frame_stream import FrameStream
from torsh_distributed.comm.transport.frames import BadFrame
from torsh_distributed.comm.trust.job_tls import JobTls, bound_secret
from torsh_distributed.errors import SerializationError
from torsh_distributed.launch.local.loop import Loop
from torsh_distributed.launch.nodes.records import Heartbeat, Message, decode, encode

if TYPE_CHECKING:
    from torsh_distributed.comm.trust.tls_channel import TlsChannel

PROTOCOL = b"TORSHLN3"
MOST_RECORD_BYTES = 1 << 18
_READ_BYTES = 1 << 16


class LauncherConnection:
    """One end of a connection, driven by the loop; only `beat` may be called from another thread.

    `on_message` is called with every genuine record; `on_close` once, with the reason, when the other end is gone
    or sends something else, but not after `close`. Set both before the loop runs again.
    """

    def __init__(
        self, loop: Loop, sock: socket.socket, token: str, *, is_server: bool, tls: JobTls | None = None
    ) -> None:
        self.on_message: Callable[[Message], None] = lambda _: None
        self.on_close: Callable[[str], None] = lambda _: None
        self.last_heard_s = time.monotonic()
        self._loop = loop
        self._sock: socket.socket | TlsChannel = sock
        self._waiting: list[Message] = []
        self._outgoing = bytearray()
        self._is_open = True
        self._lock = threading.Lock()
        """Held while the socket and what is to be sent are touched; never while `on_message` or `on_close` runs."""
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._secret = token.encode()
        self._stream: FrameStream | None = None
        """None while a client does not know the certificate yet that its proof is bound to."""
        if tls is None:
            self._begin(self._secret, is_server=is_server)
        else:
            from torsh_distributed.comm.trust.tls_channel import TlsChannel

            context = tls.server_context() if is_server else tls.client_context()
            self._sock = TlsChannel(sock, context, is_server=is_server)
            if is_server:
                self._begin(bound_secret(self._secret, tls.own_digest()), is_server=True)
        loop.watch(self._sock.fileno(), self._serve, writable=True)

    def _begin(self, secret: bytes, *, is_server: bool) -> None:
        self._stream = FrameStream(
            secret, PROTOCOL, is_server=is_server, wants_signing=True, most_bytes=MOST_RECORD_BYTES
        )
        self._outgoing += self._stream.take_outgoing()

    def send(self, message: Message) -> None:
        """Queue a record, to be sent as fast as the other end reads. Dropped if the connection is closed."""
        if not self._is_open:
            return
        with self._lock:
            self._waiting.append(message)
            self._seal_waiting()
        self._loop.watch(self._sock.fileno(), self._serve, writable=True)

    def beat(self) -> None:
        """Send a sign of life at once, from any thread. Nothing is sent before the other end has proved the secret."""
        with self._lock:
            if not self._is_open or self._stream is None or not self._stream.is_ready:
                return
            self._outgoing += self._stream.seal(encode(Heartbeat()))
            try:
                del self._outgoing[: self._sock.send(self._outgoing)]
            except OSError:
                # Full: the next beat sends it too. Broken: the loop notices, and says so.
                return

    def _seal_waiting(self) -> None:
        if self._stream is None:
            return
        self._outgoing += self._stream.take_outgoing()
        if self._stream.is_ready:
            for message in self._waiting:
                self._outgoing += self._stream.seal(encode(message))
            self._waiting = []

    def _meet_server(self) -> None:
        """Go on with the handshake of TLS as a client; its end tells which certificate the proof is bound to."""
        assert not isinstance(self._sock, socket.socket), "only TLS delays the proof"
        if not self._sock.advance():
            self._loop.watch(self._sock.fileno(), self._serve)
            raise BlockingIOError
        self._begin(bound_secret(self._secret, self._sock.peer_digest()), is_server=False)

    def _serve(self) -> None:
        with self._lock:
            found = self._exchange()
        if isinstance(found, str):
            self._fail(found)
            return
        for message in found:
            self.on_message(message)

    def _exchange(self) -> list[Message] | str:
        """Write what can be written and read what has come: the records, or why the connection cannot go on."""
        try:
            if self._stream is None:
                self._meet_server()
            assert self._stream is not None, "made by now"
            self._write()
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            return error.strerror or str(error)
        if not data:
            return "it closed the connection"
        self.last_heard_s = time.monotonic()
        try:
            messages = [decode(record) for record in self._stream.feed(data)]
        except (BadFrame, SerializationError) as error:
            return str(error)
        self._seal_waiting()
        if self._outgoing:
            self._loop.watch(self._sock.fileno(), self._serve, writable=True)
        return messages

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
        poller = select.poll()
        if self._is_open:
            poller.register(self._sock.fileno(), select.POLLOUT)
        while self._is_open and self._outgoing:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or not poller.poll(remaining_s * 1e3):
                break
            try:
                with self._lock:
                    self._write()
            except OSError:
                break
        self.close()

    def close(self) -> None:
        """Close at once; what is queued is dropped."""
        if self._is_open:
            with self._lock:
                self._is_open = False
                self._loop.unwatch(self._sock.fileno())
                self._sock.close()
