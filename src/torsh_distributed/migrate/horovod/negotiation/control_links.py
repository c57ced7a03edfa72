"""Control links: one connection from every rank of a set to its first, for small messages beside the data.

Why not the group: a rank waits on its link for messages that may come in an hour, or never, and must notice at once
when the other end is gone. On one host links are Unix sockets; between hosts TCP, where every message is signed. The
secret is new for every set and travels over the set's own group.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from typing import Any

import msgpack
import torch.distributed as dist

from torsh_distributed.comm.agreement import fail_together
from torsh_distributed.comm.collectives.objects import all_gather_object
from torsh_distributed.comm.meeting.network_interface import address_for_peers, network_identity
from torsh_distributed.comm.transport.frame_stream import FrameStream
from torsh_distributed.comm.trust.job_tls import find_tls
from torsh_distributed.errors import CommunicationError, FeatureNotAvailable, OperationTimeout

_PROTOCOL = b"TSHVDCT2"
_MOST_BYTES = 1 << 30
_READ_BYTES = 1 << 18


class LinkLost(Exception):
    """The other end of a link is gone."""


class ControlLink:
    """One end of a link. Sending never blocks: what does not fit waits in a buffer for `flush`."""

    def __init__(self, sock: socket.socket, stream: FrameStream, arrived: list[bytes]) -> None:
        """Of a socket whose other end has proved the secret, with the messages that came right behind the proof."""
        sock.setblocking(False)
        self._sock = sock
        self._stream = stream
        self._arrived = arrived
        self._unsent = bytearray()

    def fileno(self) -> int:
        """For polling."""
        return self._sock.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` has something to do when the socket takes more."""
        return bool(self._unsent)

    def send(self, message: Any) -> None:
        """Send a plain value. Raises LinkLost."""
        self._unsent += self._stream.seal(msgpack.packb(message))
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes now. Raises LinkLost."""
        while self._unsent:
            try:
                count = self._sock.send(self._unsent)
            except BlockingIOError:
                return
            except OSError as error:
                raise LinkLost(error.strerror or str(error)) from error
            del self._unsent[:count]

    def receive(self) -> list[Any]:
        """The messages that have arrived. Raises LinkLost when the other end is gone and everything is read."""
        messages, self._arrived = self._arrived, []
        is_closed = False
        try:
            while True:
                data = self._sock.recv(_READ_BYTES)
                messages += self._stream.feed(data)
                is_closed = not data
                if len(data) < _READ_BYTES:
                    break
        except BlockingIOError:
            pass
        except OSError as error:
            raise LinkLost(error.strerror or str(error)) from error
        if is_closed and not messages:
            raise LinkLost("the connection was closed")
        return [msgpack.unpackb(message, use_list=False) for message in messages]

    def close(self) -> None:
        """Close the connection; unsent bytes are dropped."""
        self._sock.close()


def connect_members(group: dist.ProcessGroup, timeout_s: float) -> dict[int, ControlLink]:
    """The links of this rank by rank of the group: on rank 0 to all others, on the others to rank 0.

    Every rank of the group calls this; all get their links or all raise.
    """
    rank = group.rank()
    deadline_s = time.monotonic() + timeout_s
    is_one_host = len(set(all_gather_object(network_identity(), group=group))) == 1
    listener = _listen(is_one_host) if rank == 0 else None
    try:
        offer = None if listener is None else (_address(listener), secrets.token_hex(32))
        address, secret = all_gather_object(offer, group=group)[0]
        with fail_together("connect its control link", group):
            if listener is not None:
                return _accept_all(listener, secret, group.size(), deadline_s)
            return {0: _connect(address, secret, rank, deadline_s)}
    finally:
        if listener is not None:
            listener.close()


def _listen(is_one_host: bool) -> socket.socket:
    if is_one_host:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # An abstract name: no file is left behind, and the secret keeps other users out.
        listener.bind(f"\0torsh-horovod-{os.getpid()}-{secrets.token_hex(8)}")
    else:
        if find_tls() is not None:
            raise FeatureNotAvailable(
                "this job is under TLS, and the negotiation of Horovod's calls between nodes has none",
                hint="use this library's own calls, or leave out --tls",
            )
        master = os.environ.get("MASTER_ADDR", socket.gethostname())
        host = address_for_peers(master) or socket.gethostname()
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.listen(socket.SOMAXCONN)
    return listener


def _address(listener: socket.socket) -> str | tuple[str, int]:
    name = listener.getsockname()
    return name.decode() if isinstance(name, bytes) else (name[0], name[1])


def _accept_all(listener: socket.socket, secret: str, num_ranks: int, deadline_s: float) -> dict[int, ControlLink]:
    links: dict[int, ControlLink] = {}
    while len(links) < num_ranks - 1:
        listener.settimeout(_remaining_s(deadline_s))
        try:
            sock, _ = listener.accept()
        except TimeoutError:
            missing = [rank for rank in range(1, num_ranks) if rank not in links]
            raise OperationTimeout(
                "ranks did not connect to the first rank of their process set in time",
                hint="check that the nodes reach each other",
                missing_ranks=missing,
            ) from None
        try:
            stream, arrived = _prove(sock, secret, deadline_s, is_server=True)
            while not arrived:
                arrived += stream.feed(_read(sock))
        except (LinkLost, OSError):
            sock.close()  # a stranger: members follow
            continue
        links[msgpack.unpackb(arrived[0])] = ControlLink(sock, stream, arrived[1:])
    return links


def _connect(address: str | tuple[str, int], secret: str, rank: int, deadline_s: float) -> ControlLink:
    is_local = isinstance(address, str)
    family = socket.AF_UNIX if is_local else socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(_remaining_s(deadline_s))
        sock.connect(address if is_local else tuple(address))
        if not is_local:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = ControlLink(sock, *_prove(sock, secret, deadline_s, is_server=False))
        link.send(rank)
        return link
    except (LinkLost, OSError) as error:
        sock.close()
        raise CommunicationError(
            "the first rank of the process set cannot be reached",
            hint="check that the nodes reach each other on the interface of MASTER_ADDR",
            address=address,
            reason=str(error),
        ) from error


def _prove(sock: socket.socket, secret: str, deadline_s: float, *, is_server: bool) -> tuple[FrameStream, list[bytes]]:
    """The stream of a connection whose other end has the secret, and the messages that came with the proof."""
    is_local = sock.family == socket.AF_UNIX
    if not is_local and is_server:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream = FrameStream(
        bytes.fromhex(secret), _PROTOCOL, is_server=is_server, wants_signing=not is_local, most_bytes=_MOST_BYTES
    )
    sock.settimeout(_remaining_s(deadline_s))
    sock.sendall(stream.take_outgoing())
    arrived: list[bytes] = []
    while not stream.is_ready:
        arrived += stream.feed(_read(sock))
        sock.sendall(stream.take_outgoing())
    return stream, arrived


def _read(sock: socket.socket) -> bytes:
    data = sock.recv(_READ_BYTES)
    if not data:
        raise LinkLost("the connection was closed")
    return data


def _remaining_s(deadline_s: float) -> float:
    return max(deadline_s - time.monotonic(), 0.001)
