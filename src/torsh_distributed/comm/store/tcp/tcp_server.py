"""`TcpStoreServer`: a store behind a port, served by a thread of this process.

torch's TCPStore cannot keep the contract (no expiry, no conditional delete, a compare-and-set that does not say
which client won, no secret; see docs/decisions/0003-stores.md), so our clients are served from a table.
"""

from __future__ import annotations

import logging
import socket
import threading
from types import TracebackType
from typing import Self

from torsh_distributed.comm.store.tcp.store_loop import StoreLoop
from torsh_distributed.comm.store.tcp.torch_clients import TorchForwarding
from torsh_distributed.comm.trust.job_tls import JobTls
from torsh_distributed.comm.trust.socket_peers import is_loopback_address
from torsh_distributed.errors import IoError

_log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 10.0
_BACKLOG = 2048


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
