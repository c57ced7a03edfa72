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
        """Does not fail: a stranger may have reset the connection already, which the first read then says."""
        sock.setblocking(False)
        self.family = sock.family
        # TLS has a descriptor of its own: if it refuses the socket, the loop's is still there to be unwatched.
        self._raw = sock
        self._sock: ssl.SSLSocket | None = None
        self._error: OSError | None = None
        try:
            sock.getpeername()  # TLS would take a connection that is gone for one to be made
            self._sock = context.wrap_socket(sock.dup(), server_side=is_server, do_handshake_on_connect=False)
        except OSError as error:  # ssl.SSLError is one
            self._error = error
        self.is_ready = False

    @property
    def _tls(self) -> ssl.SSLSocket:
        if self._sock is None:
            raise self._error or ConnectionResetError("the connection is closed")
        return self._sock

    def advance(self) -> bool:
        """Continue the handshake; whether it is done."""
        if not self.is_ready:
            try:
                self._tls.do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return False
            self.is_ready = True
        return True

    def peer_digest(self) -> bytes:
        """Of the certificate that the other end has shown; only once ready."""
        return certificate_digest(self._tls)

    def recv(self, num_bytes: int) -> bytes:
        """What has arrived; empty at the end. Raises BlockingIOError if nothing has."""
        if not self.advance():
            raise BlockingIOError
        try:
            return self._tls.recv(num_bytes)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def send(self, data: bytes | bytearray | memoryview) -> int:
        """Send as much as the socket takes. After BlockingIOError the next call must begin with the same bytes."""
        if not self.advance():
            raise BlockingIOError
        try:
            return self._tls.send(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def sendall(self, data: bytes) -> None:
        """Send a few bytes, for which there is always room on a new connection."""
        if self.send(data) < len(data):
            raise ConnectionResetError("the other end does not read")

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """As for a socket."""
        self._raw.setsockopt(level, option, value)

    def fileno(self) -> int:
        """For the loop."""
        return self._raw.fileno()

    def close(self) -> None:
        """Close at once."""
        if self._sock is not None:
            self._sock.close()
        self._raw.close()


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
