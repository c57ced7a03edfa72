from __future__ import annotations

import socket

from torsh_distributed.comm.transport.packets import receive_packet


def test_what_the_other_end_said_is_read_to_the_last_packet_although_it_left_some_unread() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            theirs.send(b"first")
            theirs.send(b"last")
            ours.send(b"never read")
        assert [receive_packet(ours, 16) for _ in range(3)] == [b"first", b"last", b""]
