"""Packets between two processes of a machine, over a Unix socket that keeps them whole (`SOCK_SEQPACKET`)."""

from __future__ import annotations

import socket


def receive_packet(sock: socket.socket, max_bytes: int, flags: int = 0) -> bytes:
    """The next packet; empty once the other end is closed and all that it sent has been read. Raises as `recv` does.

    Why not `recv`: if a process ends with packets unread, Linux gives the other side ConnectionResetError first, once,
    and only then the packets that this process had sent. Its last word, such as the exception that ended it, is there.
    """
    try:
        return sock.recv(max_bytes, flags)
    except ConnectionResetError:
        return sock.recv(max_bytes, flags)
