"""A client of a Dask cluster, from whatever the user has: a client, a cluster object or an address."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from torsh_distributed.errors import CommunicationError, FeatureNotAvailable, InvalidArgument

_CONNECT_S = 30.0


def require_dask() -> Any:
    """The package `distributed`; raises FeatureNotAvailable with the line that installs it."""
    try:
        import distributed
    except ImportError as error:
        raise FeatureNotAvailable(
            "dask.distributed is not installed", hint='pip install "torsh-distributed[dask]"', reason=str(error)
        ) from error
    return distributed


@contextmanager
def client_of(where: Any, *, timeout_s: float = _CONNECT_S) -> Iterator[Any]:
    """A client of the cluster: the user's own, or one that lasts as long as this block.

    `where`: a `distributed.Client`; any cluster object, as LocalCluster, dask-jobqueue's and dask-kubernetes' are; or
    the scheduler's address.
    """
    distributed = require_dask()
    if isinstance(where, distributed.Client):
        if where.asynchronous:
            raise InvalidArgument(
                "the Dask client is asynchronous, and a job blocks until it ends",
                hint="pass the cluster or its scheduler_address; call this from a thread",
            )
        yield where
        return
    address = where if isinstance(where, str) else getattr(where, "scheduler_address", None)
    if not address:
        raise InvalidArgument(
            "a Dask client, a cluster or the address of a scheduler is needed",
            hint="for example Client(cluster), LocalCluster() or 'tcp://10.0.0.1:8786'",
            got=type(where).__name__,
        )
    security = getattr(where, "security", None)
    _require_listener(address, timeout_s)
    try:
        client = distributed.Client(address, timeout=timeout_s, security=security or None, set_as_default=False)
    except (OSError, TimeoutError) as error:
        raise _no_scheduler(address, error) from error
    try:
        yield client
    finally:
        client.close()


def _require_listener(address: str, timeout_s: float) -> None:
    """Raise if nobody listens there: a client that fails to connect leaves its thread behind."""
    found = urlsplit(address)
    if found.scheme not in ("tcp", "tls") or not found.hostname or not found.port:
        return
    try:
        socket.create_connection((found.hostname, found.port), timeout=timeout_s).close()
    except OSError as error:
        raise _no_scheduler(address, error) from error


def _no_scheduler(address: str, error: Exception) -> CommunicationError:
    return CommunicationError(
        f"no Dask scheduler answers at {address}",
        hint="check the address and the port (8786, not the dashboard's 8787), and TLS on both sides",
        address=address,
        reason=str(error),
    )
