"""A server on the same network is found by mDNS, and believed for its certificate alone.

Anybody may announce anything. A device knows the digest of its server's certificate from its token, so it asks each
address that is announced for the certificate, and takes the one that shows it; a false answer costs it a handshake.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import queue
import socket
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torsh_distributed.errors import CommunicationError, missing_extra
from torsh_distributed.federated.deployment.identity.device_identity import client_context

if TYPE_CHECKING:
    from types import ModuleType

_SERVICE = "_torsh-federated._tcp.local."
_CERTIFICATE = b"certificate"
_HANDSHAKE_S, _ANSWER_S = 3.0, 3
_MOST_CANDIDATES = 64


def _zeroconf() -> ModuleType:
    try:
        import zeroconf
    except ImportError as error:
        raise missing_extra("discovery", "finding servers by mDNS") from error
    return zeroconf


@contextlib.contextmanager
def _speaking(zeroconf: ModuleType, interfaces: Any) -> Iterator[Any]:
    """mDNS on these interfaces; its thread and sockets end with it."""
    with zeroconf.Zeroconf(interfaces=interfaces) as network:
        yield network
    network.loop.close()  # its thread has ended, and left the loop's own sockets open


@contextlib.contextmanager
def announced(address: tuple[str, int], digest: bytes) -> Iterator[None]:
    """While open, devices on the networks that the server listens on can find it."""
    zeroconf = _zeroconf()
    host, port = address
    is_everywhere = ipaddress.ip_address(host).is_unspecified
    with _speaking(zeroconf, zeroconf.InterfaceChoice.All if is_everywhere else [host]) as responder:
        hosts = zeroconf.get_all_addresses() if is_everywhere else [host]
        info = zeroconf.ServiceInfo(
            _SERVICE,
            f"{digest.hex()[:16]}.{_SERVICE}",
            port=port,
            properties={_CERTIFICATE: digest.hex().encode()},
            parsed_addresses=hosts,
            server=f"torsh-{digest.hex()[:16]}.local.",
        )
        responder.register_service(info, allow_name_change=True)
        yield


def find_server(digest: bytes, timeout_s: float) -> tuple[str, int]:
    """The address of the server with this certificate. CommunicationError if none shows up in time."""
    zeroconf = _zeroconf()
    end_s = time.monotonic() + timeout_s
    names: queue.SimpleQueue[str] = queue.SimpleQueue()

    def seen(*, name: str, **_: object) -> None:
        names.put(name)

    tried: set[tuple[str, int]] = set()
    with _speaking(zeroconf, zeroconf.InterfaceChoice.All) as resolver:
        browser = zeroconf.ServiceBrowser(resolver, _SERVICE, handlers=[seen])
        try:
            while len(tried) < _MOST_CANDIDATES and (left_s := end_s - time.monotonic()) > 0:
                try:
                    name = names.get(timeout=left_s)
                except queue.Empty:
                    break
                info = resolver.get_service_info(_SERVICE, name, timeout=1000 * _ANSWER_S)
                if info is None or info.properties.get(_CERTIFICATE) != digest.hex().encode():
                    continue
                for address in [(host, info.port) for host in info.parsed_addresses()]:
                    if address not in tried and _shows(address, digest):
                        return address
                    tried.add(address)
        finally:
            browser.cancel()
    raise CommunicationError(
        "the server of this device was not found on the local network",
        hint="start it with `serve --announce` on the same network, or give it as HOST:PORT",
        num_others=len(tried),
    )


def _shows(address: tuple[str, int], digest: bytes) -> bool:
    """Whether a server at the address has the certificate."""
    with (
        contextlib.suppress(OSError),
        socket.create_connection(address, timeout=_HANDSHAKE_S) as plain,
        client_context().wrap_socket(plain) as tls,
    ):
        return hashlib.sha256(tls.getpeercert(binary_form=True) or b"").digest() == digest
    return False
