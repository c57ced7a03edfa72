"""`TcpStoreServer`: a store behind a port, served by a thread of this process.

torch's TCPStore cannot keep the contract (no expiry, no conditional delete, a compare-and-set that does not say
which client won, no secret; see docs/decisions/0003-stores.md), so our clients are served from a table.

Connects plain torch clients to a TCPStore inside this process, for servers that ask for no secret.
A script that knows only torch then meets its peers at the same port. A torch client cannot prove a secret, so a server
that asks for one has none of this.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Self

from torsh_distributed.comm.store.tcp.store_loop import StoreLoop
from torsh_distributed.comm.trust.job_secret import is_loopback_address
from torsh_distributed.comm.trust.job_tls import JobTls
from torsh_distributed.errors import IoError

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


_log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 10.0


class TcpStoreServer:
    """Listens on construction and serves until closed.

    `host` is loopback unless the caller says otherwise; port 0 takes a free one, see `.port`. With a token, only
    clients that have it are served; plain torch clients, which cannot prove one, are refused. With `tls`, clients on
    other machines must use it.
    """

    def __init__(
        self, host: str = "127.0.0.1", port: int = 0, *, token: str | None = None, tls: JobTls | None = None
    ) -> None:
        listener = _listen(host, port)
        self.host = host
        self.port: int = listener.getsockname()[1]
        if token is None and not is_loopback_address(listener.getsockname()[0]):
            _log.warning("the store at %s can be reached from other nodes and requires no token", self.url)
        self._torch_clients = TorchForwarding()
        self._loop = StoreLoop(
            (token or "").encode(),
            report=lambda line: _log.warning("%s: %s", self.url, line),
            forward=self._torch_clients.forward if token is None and tls is None else None,
            tls=tls,
        )
        self._loop.serve([listener])
        self._thread = threading.Thread(target=self._loop.run, name=f"torsh-store-{self.port}", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The address for clients; a wildcard address is shown as it is."""
        return tcp_url(self.host, self.port)

    def close(self) -> None:
        """Stop serving: waiting clients see the connection close. The keys are gone."""
        if self._thread.is_alive():
            self._loop.stop()
            self._thread.join(_CLOSE_TIMEOUT_S)
        self._torch_clients.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def tcp_url(host: str, port: int) -> str:
    """The address as `open_store` takes it."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server((address[0], port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise IoError(
            f"the store cannot listen on {host}:{port}: {error.strerror or error}",
            hint="choose another port (0 takes a free one) and an address of this node",
            host=host,
            port=port,
            errno=error.errno,
        ) from error
