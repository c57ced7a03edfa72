"""Who is at the other end of a socket, as the kernel knows it."""

from __future__ import annotations

import ipaddress
import socket
import struct

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def peer_process(sock: socket.socket) -> tuple[int, int]:
    """Process and user at the other end of a Unix socket: who connected, or who listens."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def peer_uid(sock: socket.socket) -> int | None:
    """The user at the other end of a Unix socket, when it connected; None for other sockets."""
    return peer_process(sock)[1] if sock.family == socket.AF_UNIX else None


def peer_name(sock: socket.socket) -> str:
    """The other end for reports: its address, or its user on this machine."""
    uid = peer_uid(sock)
    if uid is not None:
        return f"user {uid}"
    try:
        return str(sock.getpeername()[0])
    except OSError:
        return "an address that is gone"


def is_same_machine(sock: socket.socket) -> bool:
    """Whether both ends are on this machine by a way that no one else can write to: Unix sockets and loopback."""
    if sock.family == socket.AF_UNIX:
        return True
    try:
        ends = (sock.getsockname()[0], sock.getpeername()[0])
    except OSError:
        return False
    return all(map(is_loopback_address, ends))


def is_loopback_address(address: str) -> bool:
    """Whether a numeric address can be reached from this machine only."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
