"""Connections that come up in a block are found and cut; others and listeners are left alone."""

from __future__ import annotations

import socket

from torsh_distributed.comm.backends.gloo.connections import new_connections


def test_only_new_connections_are_cut() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with socket.create_connection(address) as old, listener.accept()[0] as old_peer:
            with new_connections() as found:
                new, new_peer = socket.create_connection(address), listener.accept()[0]
            with new, new_peer:
                new.settimeout(20)
                assert found.cut() == 2
                assert new.recv(1) == b"", "a blocked read returns"
                assert found.cut() == 0, "cutting twice does nothing"
                old.sendall(b"x")
                assert old_peer.recv(1) == b"x"


def test_connections_to_the_store_and_closed_ones_are_left_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with new_connections(except_port=address[1]) as found, socket.create_connection(address), listener.accept()[0]:
            pass
        assert found.inodes == {}
        with new_connections() as found:
            client, peer = socket.create_connection(address), listener.accept()[0]
        with peer:
            client.close()
            assert found.cut() == 1, "the descriptor of the client is no longer that connection"
