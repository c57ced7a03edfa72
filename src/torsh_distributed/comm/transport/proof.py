"""How a connection begins, for a thread that can wait: TLS if the job asks for it, then the proof of the secret."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING, NamedTuple

from torsh_distributed.comm.transport.frames import BadFrame
from torsh_distributed.comm.trust.handshake import HELLO_BYTES, MAC_BYTES, Handshake, NotAMember, Signer
from torsh_distributed.comm.trust.job_secret import is_same_machine
from torsh_distributed.comm.trust.job_tls import JobTls, find_tls

if TYPE_CHECKING:
    import ssl


class ProvedSocket(NamedTuple):
    """A socket whose other end has the secret, and what signs its frames; None where nobody else can write to it."""

    sock: socket.socket
    signers: tuple[Signer, Signer] | None


def tls_beyond(sock: socket.socket) -> JobTls | None:
    """The job's TLS, if it has one and this connection leaves the machine."""
    return None if is_same_machine(sock) else find_tls()


def prove(
    sock: socket.socket,
    secret: bytes,
    protocol: bytes,
    *,
    is_server: bool,
    timeout_s: float,
    tls: JobTls | None,
    context: ssl.SSLContext | None = None,
) -> ProvedSocket:
    """Prove the secret to the other end and have it proved, in blocking calls.

    The result has taken the socket over. Raises BadFrame if the other end is not a member of the job, and OSError; then
    the socket is closed. `context` saves making one.
    """
    deadline_s = time.monotonic() + timeout_s
    try:
        sock.settimeout(timeout_s)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wants_signing = bool(secret) and tls is None and not is_same_machine(sock)
        if tls is not None:
            from torsh_distributed.comm.trust.tls_channel import encrypted

            sock, secret = encrypted(sock, tls, secret, is_server=is_server, context=context)
        handshake = Handshake(secret, protocol, is_server=is_server, wants_signing=wants_signing)
        if not is_server:
            sock.sendall(handshake.opening)
        # Fed as it comes: a stranger is found out by his first bytes, not when he has sent as many as a member would.
        num_missing = HELLO_BYTES + MAC_BYTES
        while not handshake.is_done:
            sock.settimeout(_remaining_s(deadline_s))
            data = receive_some(sock, num_missing)
            num_missing -= len(data)
            if reply := handshake.feed(data):
                sock.sendall(reply)
    except NotAMember as error:
        sock.close()
        raise BadFrame(str(error)) from error
    except BaseException:
        sock.close()
        raise
    return ProvedSocket(sock, handshake.signers())


def _remaining_s(deadline_s: float) -> float:
    remaining_s = deadline_s - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError("the other end did not prove the secret in time")
    return remaining_s


def receive_some(sock: socket.socket, num_bytes: int) -> bytes:
    """At least one byte. Raises ConnectionResetError at the end of the stream."""
    data = sock.recv(num_bytes)
    if not data:
        raise ConnectionResetError("the other end closed the connection")
    return data


def receive_into(sock: socket.socket, view: memoryview) -> None:
    """Fill the memory. Raises ConnectionResetError if the stream ends before."""
    while view:
        num_read = sock.recv_into(view)
        if not num_read:
            raise ConnectionResetError("the other end closed the connection")
        view = view[num_read:]
