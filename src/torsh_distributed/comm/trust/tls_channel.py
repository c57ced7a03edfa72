"""A socket under TLS for event loops: the same calls, BlockingIOError where it has to wait."""

from __future__ import annotations

import hashlib
import socket
import ssl

from torsh_distributed.comm.trust.job_tls import JobTls, bound_secret


class TlsChannel:
    """One end of a connection. The handshake goes on whenever the loop reads or writes; nothing here blocks.

    A read of 16 KiB or more takes a whole record, so nothing is left inside that the loop cannot see on the socket.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, is_server: bool) -> None:
        sock.setblocking(False)
        self.family = sock.family
        self._sock = context.wrap_socket(sock, server_side=is_server, do_handshake_on_connect=False)
        self.is_ready = False

    def advance(self) -> bool:
        """Continue the handshake; whether it is done."""
        if not self.is_ready:
            try:
                self._sock.do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return False
            self.is_ready = True
        return True

    def peer_digest(self) -> bytes:
        """Of the certificate that the other end has shown; only once ready."""
        return certificate_digest(self._sock)

    def recv(self, num_bytes: int) -> bytes:
        """What has arrived; empty at the end. Raises BlockingIOError if nothing has."""
        if not self.advance():
            raise BlockingIOError
        try:
            return self._sock.recv(num_bytes)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def send(self, data: bytes | bytearray | memoryview) -> int:
        """Send as much as the socket takes. After BlockingIOError the next call must begin with the same bytes."""
        if not self.advance():
            raise BlockingIOError
        try:
            return self._sock.send(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def sendall(self, data: bytes) -> None:
        """Send a few bytes, for which there is always room on a new connection."""
        if self.send(data) < len(data):
            raise ConnectionResetError("the other end does not read")

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """As for a socket."""
        self._sock.setsockopt(level, option, value)

    def fileno(self) -> int:
        """For the loop."""
        return self._sock.fileno()

    def close(self) -> None:
        """Close at once."""
        self._sock.close()


def certificate_digest(sock: ssl.SSLSocket) -> bytes:
    """Of the certificate that the other end has shown; the handshake must be done."""
    certificate = sock.getpeercert(binary_form=True)
    if certificate is None:
        raise ssl.SSLError("the other end showed no certificate")
    return hashlib.sha256(certificate).digest()


def encrypted(
    sock: socket.socket, tls: JobTls, secret: bytes, *, is_server: bool, context: ssl.SSLContext | None = None
) -> tuple[ssl.SSLSocket, bytes]:
    """A blocking socket under TLS, and the secret for a proof that holds for the server's certificate alone.

    The handshake ends within the socket's timeout; the result has taken the socket over. `context` saves making one.
    """
    if is_server:
        channel = (context or tls.server_context()).wrap_socket(sock, server_side=True)
        return channel, bound_secret(secret, tls.own_digest())
    channel = (context or tls.client_context()).wrap_socket(sock)
    return channel, bound_secret(secret, certificate_digest(channel))
