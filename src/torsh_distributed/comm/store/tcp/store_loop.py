"""The server of TCP and Unix stores: one thread, and every connection proves the job's secret before a request is read.

Not asyncio: its streams take three times as long per request as the table does. Imports no torch, so the process that
serves a job's store starts in milliseconds.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torsh_distributed.comm.store.tcp import tcp_protocol
from torsh_distributed.comm.store.tcp.store_requests import StoreRequests
from torsh_distributed.comm.trust.handshake import MAC_BYTES, Handshake, NotAMember, Signer
from torsh_distributed.comm.trust.job_secret import is_same_machine, peer_name, peer_uid
from torsh_distributed.comm.trust.job_tls import JobTls, bound_secret
from torsh_distributed.comm.trust.stranger_pool import PROOF_TIMEOUT_S, StrangerPool

if TYPE_CHECKING:
    from torsh_distributed.comm.trust.tls_channel import TlsChannel

_READ_BYTES = 2**16
_LARGE_READ_BYTES = 2**20
_ACCEPTS_PER_TURN = 32
_CHANCE_S = 0.5
"""How long a stranger keeps its place while others wait to be accepted; a busy member may take that long to answer."""
# torch's server closes the connection if a client's first message arrives in pieces, so it is forwarded whole.
_TORCH_OPENING_BYTES = 5
_HEADER_BYTES = tcp_protocol.FRAME_HEADER.size

TorchForwarder = Callable[[socket.socket, bytes], None]


class _StorePeer:
    """One connection, from its first byte to its end."""

    __slots__ = ("address", "handshake", "inbox", "is_open", "is_ours", "outbox", "receiving", "sending", "sock")

    def __init__(self, sock: socket.socket, address: str) -> None:
        self.sock: socket.socket | TlsChannel = sock
        self.address = address
        self.handshake: Handshake | None = None
        self.receiving: Signer | None = None
        self.sending: Signer | None = None
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.is_open = True
        self.is_ours = False


class StoreLoop:
    """Serves until `stop`. Only `stop` may be called from another thread.

    `secret` is what clients must prove; without one `b""` lets in everyone who speaks the protocol. `forward` takes
    connections of plain torch clients; without it they are refused. `report` gets a line about refused connections.
    With `tls`, connections from other machines must be encrypted.
    """

    def __init__(
        self,
        secret: bytes,
        *,
        report: Callable[[str], None],
        forward: TorchForwarder | None = None,
        tls: JobTls | None = None,
    ) -> None:
        self._secret = secret
        self._tls = None if tls is None else tls.server_context()
        self._tls_secret = secret if tls is None else bound_secret(secret, tls.own_digest())
        self._report = report
        self._forward = forward
        self._requests: StoreRequests[_StorePeer] = StoreRequests(self._tell)
        self._peers: dict[int, _StorePeer] = {}
        self._strangers: StrangerPool[_StorePeer] = StrangerPool()
        self._proof_deadlines: deque[tuple[float, _StorePeer]] = deque()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._listeners: list[socket.socket] = []
        self._paused_until_s: float | None = None
        self._has_told_of_files = False
        self._epoll = select.epoll()
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_over = False
        self.watch(self._wakeup, self._end)

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Call back when the descriptor is readable."""
        self._callbacks[fd] = callback
        self._epoll.register(fd, select.EPOLLIN)

    def serve(self, listeners: Sequence[socket.socket]) -> None:
        """Serve an empty store on these sockets, which now belong to the loop; the previous ones are closed."""
        for peer in list(self._peers.values()):
            self._drop(peer)
        for listener in self._listeners:
            self._forget(listener)
        self._paused_until_s = None
        self._requests = StoreRequests(self._tell)
        self._listeners = list(listeners)
        for listener in self._listeners:
            listener.setblocking(False)
            self.watch(listener.fileno(), lambda listener=listener: self._accept(listener))  # type: ignore[misc]

    def stop(self) -> None:
        """End `run`; clients see their connection close."""
        os.eventfd_write(self._wakeup, 1)

    def _end(self) -> None:
        self._is_over = True

    def run(self) -> None:
        """Serve until `stop`."""
        peers, callbacks = self._peers, self._callbacks
        try:
            while not self._is_over:
                for fd, mask in self._epoll.poll(self._next_timeout_s()):
                    peer = peers.get(fd)
                    if peer is None:
                        if fd in callbacks:
                            callbacks[fd]()
                    elif mask & select.EPOLLOUT:
                        self._flush(peer)
                    elif peer.handshake is None:
                        self._receive(peer)
                    else:
                        self._question(peer)
        finally:
            self._close()

    def _next_timeout_s(self) -> float | None:
        """Handle what is due, and return the time to the next deadline."""
        requests = self._requests
        if not (
            requests.deadlines
            or self._proof_deadlines
            or self._strangers.has_refused
            or self._paused_until_s is not None
        ):
            return None
        now_s = time.monotonic()
        requests.end_due(now_s)
        while self._proof_deadlines and self._proof_deadlines[0][0] <= now_s:
            peer = self._proof_deadlines.popleft()[1]
            if peer in self._strangers:
                self._refuse(peer, f"no proof of the job's secret within {PROOF_TIMEOUT_S:g} s")
        due_s = self._strangers.summary_due_s(now_s)
        if self._paused_until_s is not None and self._paused_until_s <= now_s:
            self._accept_again()
        if due_s is not None and due_s <= now_s:
            self._report(self._strangers.summary(now_s))
            due_s = None
        moments = [due_s] if due_s is not None else []
        if requests.deadlines:
            moments.append(requests.deadlines[0][0])
        if self._proof_deadlines:
            moments.append(self._proof_deadlines[0][0])
        if self._paused_until_s is not None:
            moments.append(self._paused_until_s)
        return max(0.0, min(moments) - now_s) if moments else None

    # Strangers, until they have proved the secret

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            if self._strangers.is_full and self._pauses():
                return
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._pause_without_files()
                # Otherwise no more of them, or it left before it was accepted.
                return
            sock.setblocking(False)
            peer = _StorePeer(sock, peer_name(sock))
            self._peers[sock.fileno()] = peer
            self._epoll.register(sock.fileno(), select.EPOLLIN)
            evicted = self._strangers.admit(peer, peer.address)
            if evicted is not None:
                self._refuse(evicted, "too many at once without a proof of the job's secret")
            if peer_uid(sock) not in (None, os.geteuid()):
                self._refuse(peer, "it runs as another user")
                continue
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            peer.handshake = self._new_handshake(peer, sock)
            self._proof_deadlines.append((time.monotonic() + PROOF_TIMEOUT_S, peer))

    def _pauses(self) -> bool:
        """Accept nobody while all strangers are new; whether that is so.

        Why: a thousand ranks that connect at once wait in the kernel's queue and cost each other nothing. Whoever had
        its chance to prove the secret loses its place instead, so that idle connections keep nobody out.
        """
        while self._proof_deadlines and self._proof_deadlines[0][1] not in self._strangers:
            self._proof_deadlines.popleft()
        if not self._proof_deadlines:
            return False
        chance_s = self._proof_deadlines[0][0] - PROOF_TIMEOUT_S + _CHANCE_S
        if chance_s <= time.monotonic():
            return False
        self._pause(chance_s)
        return True

    def _pause_without_files(self) -> None:
        """The limit of open files is reached: who waits is accepted when others have left."""
        if not self._has_told_of_files:
            self._has_told_of_files = True
            self._report(
                f"the store has {len(self._peers)} connections, as many as it may open: further ranks wait; raise the "
                "limit of open files (`ulimit -n`) where the job is started, one or two for each rank"
            )
        self._pause(time.monotonic() + _CHANCE_S)

    def _pause(self, until_s: float) -> None:
        self._paused_until_s = until_s
        for listener in self._listeners:
            self._epoll.modify(listener.fileno(), 0)

    def _accept_again(self) -> None:
        self._paused_until_s = None
        for listener in self._listeners:
            self._epoll.modify(listener.fileno(), select.EPOLLIN)

    def _new_handshake(self, peer: _StorePeer, sock: socket.socket) -> Handshake:
        """The proof that is asked for; beyond this machine under TLS, or with every later message signed."""
        if self._tls is None or is_same_machine(sock):
            is_signed = bool(self._secret) and not is_same_machine(sock)
            return Handshake(self._secret, tcp_protocol.MAGIC, is_server=True, wants_signing=is_signed)
        from torsh_distributed.comm.trust.tls_channel import TlsChannel

        peer.sock = TlsChannel(sock, self._tls, is_server=True)
        return Handshake(self._tls_secret, tcp_protocol.MAGIC, is_server=True, wants_signing=False)

    def _question(self, peer: _StorePeer) -> None:
        """Take the next bytes of a stranger."""
        handshake = peer.handshake
        assert handshake is not None, "only strangers are questioned"
        try:
            data = peer.sock.recv(_READ_BYTES)
            if not data:
                self._refuse(peer, "it left without a proof of the job's secret")
                return
            if self._forward is not None and not peer.is_ours:
                peer.inbox += data
                if self._is_torch(peer):
                    return
                data = bytes(peer.inbox)
                peer.inbox.clear()
            reply = handshake.feed(data)
            if reply:
                peer.sock.sendall(reply)
        except BlockingIOError:
            return
        except NotAMember as error:
            self._refuse(peer, str(error))
            return
        except OSError as error:
            self._refuse(peer, error.strerror or str(error))
            return
        if handshake.is_done:
            self._strangers.release(peer)
            if self._paused_until_s is not None:
                self._accept_again()
            signers = handshake.signers()
            if signers is not None:
                peer.sending, peer.receiving = signers
            peer.handshake = None
            rest = handshake.rest
            if rest:
                self._take(peer, rest)

    def _is_torch(self, peer: _StorePeer) -> bool:
        """Whether a torch client sent these first bytes; it is forwarded, once its greeting is complete."""
        assert self._forward is not None, "otherwise nobody asks"
        peer.is_ours = tcp_protocol.MAGIC.startswith(peer.inbox[:_TORCH_OPENING_BYTES])
        if peer.is_ours or len(peer.inbox) < _TORCH_OPENING_BYTES:
            return not peer.is_ours
        assert isinstance(peer.sock, socket.socket), "a server with TLS forwards nobody"
        self._strangers.release(peer)
        self._epoll.unregister(peer.sock.fileno())
        del self._peers[peer.sock.fileno()]
        peer.is_open = False
        self._forward(peer.sock, bytes(peer.inbox))
        return True

    def _refuse(self, peer: _StorePeer, reason: str) -> None:
        self._strangers.refuse(peer, reason)
        if self._paused_until_s is not None:
            self._accept_again()
        self._drop(peer)

    # Members

    def _receive(self, peer: _StorePeer) -> None:
        try:
            data = peer.sock.recv(_LARGE_READ_BYTES if peer.inbox else _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._take(peer, data)
        else:
            self._drop(peer)

    def _take(self, peer: _StorePeer, data: bytes | bytearray) -> None:
        """Carry out the requests that `data` completes, and send the replies together."""
        inbox = peer.inbox
        if inbox:
            inbox += data
            data = inbox
        overhead = _HEADER_BYTES + (MAC_BYTES if peer.receiving is not None else 0)
        replies: list[bytes] = []
        position, end = 0, len(data)
        try:
            while end - position >= overhead:
                (num_bytes,) = tcp_protocol.FRAME_HEADER.unpack_from(data, position)
                if num_bytes > tcp_protocol.MAX_FRAME_BYTES:
                    raise ValueError(f"it announced a frame of {num_bytes} bytes")
                start = position + overhead
                stop = start + num_bytes
                if stop > end:
                    break
                body = bytes(data[start:stop])
                if peer.receiving is not None:
                    peer.receiving.check(data[start - MAC_BYTES : start], body)
                reply = self._requests.answer(peer, body)
                if reply is not None:
                    replies.append(tcp_protocol.frame(reply, peer.sending))
                position = stop
        except (ValueError, NotAMember) as error:
            self._report(f"a client at {peer.address} was cut off: {error}")
            self._drop(peer)
            return
        if data is inbox:
            del inbox[:position]
        elif position < end:
            inbox += data[position:]
        if replies:
            self._send(peer, b"".join(replies) if len(replies) > 1 else replies[0])

    # Sending, and the end of a connection

    def _tell(self, peer: _StorePeer, reply: bytes) -> None:
        """Send a reply that comes later than its request."""
        self._send(peer, tcp_protocol.frame(reply, peer.sending))

    def _send(self, peer: _StorePeer, data: bytes) -> None:
        if peer.outbox:
            peer.outbox += data
            return
        try:
            num_sent = peer.sock.send(data)
        except BlockingIOError:
            num_sent = 0
        except OSError:
            self._drop(peer)
            return
        if num_sent < len(data):
            peer.outbox += memoryview(data)[num_sent:]
            # Reads nothing more until this client has taken its replies.
            self._epoll.modify(peer.sock.fileno(), select.EPOLLOUT)

    def _flush(self, peer: _StorePeer) -> None:
        try:
            del peer.outbox[: peer.sock.send(peer.outbox)]
        except BlockingIOError:
            return
        except OSError:
            self._drop(peer)
            return
        if not peer.outbox:
            self._epoll.modify(peer.sock.fileno(), select.EPOLLIN)

    def _drop(self, peer: _StorePeer) -> None:
        if peer.is_open:
            peer.is_open = False
            if peer in self._strangers:
                self._strangers.release(peer)
            self._epoll.unregister(peer.sock.fileno())
            del self._peers[peer.sock.fileno()]
            peer.sock.close()

    def _forget(self, listener: socket.socket) -> None:
        self._epoll.unregister(listener.fileno())
        del self._callbacks[listener.fileno()]
        listener.close()

    def _close(self) -> None:
        now_s = time.monotonic()
        if self._strangers.summary_due_s(now_s) is not None:
            self._report(self._strangers.summary(now_s))
        self.serve([])
        self._epoll.close()
        os.close(self._wakeup)
