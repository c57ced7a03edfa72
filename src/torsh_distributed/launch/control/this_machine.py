"""Whether the name of a host means the machine this runs on."""

from __future__ import annotations

import ipaddress
import socket

LOOPBACK_NAMES = ("localhost", "localhost.localdomain")


def is_this_machine(host: str) -> bool:
    """Whether a name or address means the machine this runs on."""
    own = socket.gethostname()
    if host in LOOPBACK_NAMES or host == own or host.partition(".")[0] == own.partition(".")[0]:
        return True
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return any(_is_own_address(str(address)) for address in found)


def _is_own_address(address: str) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if parsed.is_loopback:
        return True
    with socket.socket(socket.AF_INET6 if parsed.version == 6 else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
