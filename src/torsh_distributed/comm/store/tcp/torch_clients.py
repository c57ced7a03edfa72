"""Connects plain torch clients to a TCPStore inside this process, for servers that ask for no secret.

A script that knows only torch then meets its peers at the same port. A torch client cannot prove a secret, so a server
that asks for one has none of this.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

_BUFFER_BYTES = 2**16
_BACKLOG = 2048
_TIMEOUT = timedelta(seconds=10)


class TorchForwarding:
    """A thread for each connection, and one store for all of them, started with the first."""

    def __init__(self) -> None:
        self._store: dist.TCPStore | None = None
        self._mutex = threading.Lock()

    def forward(self, client: socket.socket, opening: bytes) -> None:
        """Take over the connection, on which `opening` has arrived; returns at once."""
        threading.Thread(target=self._connect, args=(client, opening), name="torsh-store-torch", daemon=True).start()

    def _connect(self, client: socket.socket, opening: bytes) -> None:
        with client:
            client.setblocking(True)
            with self._mutex:
                if self._store is None:
                    self._store = _start_torch_store()
                port = self._store.port
            try:
                inner = socket.create_connection(("127.0.0.1", port))
            except OSError:
                return  # `close` has ended the store in the meantime: the client sees its connection close
            with inner:
                _carry(client, inner, opening)

    def close(self) -> None:
        """End the store inside; its clients see their connections close."""
        self._store = None


def _carry(one: socket.socket, other: socket.socket, opening: bytes) -> None:
    """Pass `opening` from `one` to `other`, then bytes both ways until either side ends."""
    ways = {one: other, other: one}
    with contextlib.suppress(OSError):  # a side that is gone ends it, as a closed one does
        other.sendall(opening)
        while True:
            for source in select.select([one, other], [], [])[0]:
                data = source.recv(_BUFFER_BYTES)
                if not data:
                    return
                ways[source].sendall(data)


def _start_torch_store() -> dist.TCPStore:
    import torch.distributed as dist

    # torch's own listener would listen on every interface; only this server needs to reach it.
    listener = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
    return dist.TCPStore(
        "127.0.0.1",
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=_TIMEOUT,
        master_listen_fd=listener.detach(),
    )
