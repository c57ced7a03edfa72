"""The network interface on which a job's ranks reach each other, chosen by where the master is.

Why: left alone, gloo listens on the address that the host's own name resolves to. On Debian that is 127.0.1.1, which no
other host reaches; on a host with several interfaces it may be the wrong one; and a job on one host would listen on the
network for no reason. nccl takes the first interface by name.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Literal

from torsh_distributed import known_variables
from torsh_distributed.comm.trust.job_tls import find_tls
from torsh_distributed.errors import ConfigurationError, FeatureNotAvailable

Leg = Literal["gloo", "mpi"]
LEG_VARIABLE = "TORSH_BETWEEN_NODES"


def chosen_leg(option: Leg | None, environ: Mapping[str, str]) -> Leg:
    """The option, else the variable, else gloo; raises for what is neither, and for MPI in a job under TLS."""
    leg = option or known_variables.text(LEG_VARIABLE, environ)
    if leg == "gloo":
        return "gloo"
    if leg != "mpi":
        raise ConfigurationError(f"{LEG_VARIABLE} must be gloo or mpi", hint="set one of them, or unset it", value=leg)
    if find_tls(environ) is not None:
        raise FeatureNotAvailable(
            "this job is under TLS, and MPI cannot encrypt what goes between nodes",
            hint=f"unset {LEG_VARIABLE}, or leave out --tls and encrypt the network itself (WireGuard, IPsec)",
        )
    return "mpi"


_LOOPBACK_ADDRESS = "127.0.0.1"
LOOPBACK = "lo"
VARIABLES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}
"""Variables that name the interface to torch's backends, and how; nccl takes a bare name for a prefix of names."""

_SIOCGIFCONF = 0x8912
_IFREQ_BYTES = 40
_ANY_PORT = 9  # of the address alone; a datagram socket sends nothing when it connects
# Addresses for documentation: they belong to nobody, and are reached by the default route if there is one.
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")


def network_identity() -> str:
    """A name that two processes share if they have the same interfaces, so also the same loopback."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    if not boot_id.exists():
        return socket.gethostname()
    return f"{boot_id.read_text().strip()}:{Path('/proc/self/ns/net').stat().st_ino}"


def address_towards(host: str) -> str | None:
    """The address of this machine that connections to `host` come from; None if there is no way there."""
    try:
        found = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    # IPv4 first, as the master listens where its name has both.
    for family, kind, protocol, _, address in sorted(found, key=lambda entry: entry[0] != socket.AF_INET):
        with socket.socket(family, kind, protocol) as sock:
            try:
                sock.connect(address)
            except OSError:
                continue  # no route in this family
            return str(sock.getsockname()[0])
    return None


def interface_of(address: str) -> str | None:
    """The interface that has `address`; None if none has."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    return next((name for name, owned in _owned_addresses() if owned == wanted), None)


def address_for_peers(master: str) -> str | None:
    """The address of this machine for ranks on other hosts: the one that reaches the master; None if there is none.

    If the master's name means loopback here, as the own name of a Debian host does, it is the address of the host's
    name, and if that is loopback too the one on the default route.
    """
    address = address_towards(master)
    if address is None or _is_loopback(address):
        address = address_towards(socket.gethostname())
    if address is None or _is_loopback(address):
        address = outward_address()
    return address


def job_interface(master: str, *, is_one_host: bool) -> str | None:
    """The interface that the backends of a job use: loopback on one host, else the one that reaches the master.

    None if there is no such interface; the backends then choose by themselves.
    """
    if is_one_host:
        return LOOPBACK if any(name == LOOPBACK for name, _ in _owned_addresses()) else None
    address = address_for_peers(master)
    return None if address is None else interface_of(address)


def interface_between_nodes(master: str, *, num_nodes: int) -> str | None:
    """`job_interface` for a launcher. It knows no other node: if the master is on loopback, all are on this host."""
    here = None if num_nodes == 1 else address_towards(master)
    return job_interface(master, is_one_host=num_nodes == 1 or (here is not None and _is_loopback(here)))


def outward_address() -> str | None:
    """The address of this machine on its default route, or its only one beyond loopback; None if there is neither."""
    for elsewhere in _ELSEWHERE:
        address = address_towards(elsewhere)
        if address is not None and not _is_loopback(address):
            return address
    beyond = [owned for _, owned in _owned_addresses() if not (owned.is_loopback or owned.is_link_local)]
    return str(beyond[0]) if len(beyond) == 1 else None


def interface_variables(interface: str | None) -> dict[str, str]:
    """What tells torch's backends to use `interface`. On loopback nccl chooses by itself: it shares memory there."""
    if interface is None:
        return {}
    if interface == LOOPBACK:
        return {"GLOO_SOCKET_IFNAME": LOOPBACK}
    return {name: form.format(interface) for name, form in VARIABLES.items()}


def tell_backends(interface: str | None, environ: MutableMapping[str, str]) -> tuple[str, ...]:
    """Name `interface` to torch's backends in `environ`, unless the user named one; returns the variables set."""
    added = {name: value for name, value in interface_variables(interface).items() if name not in environ}
    environ.update(added)
    return tuple(added)


def listening_address(environ: Mapping[str, str]) -> str:
    """Where a rank listens for ranks on other hosts: on the interface that the launcher or the user named.

    Without one it is the address that reaches the master, loopback if that is on this host.
    """
    interface = environ.get("GLOO_SOCKET_IFNAME")
    if interface is not None:
        for name, address in _owned_addresses():
            if name == interface and not (address.is_link_local and address.version == 6):
                return str(address)
    return address_towards(known_variables.text("MASTER_ADDR", environ)) or _LOOPBACK_ADDRESS


def gloo_address(environ: Mapping[str, str]) -> str | None:
    """The address that a gloo group between hosts should listen on; None leaves it to gloo.

    It is left to gloo if a variable names the interface; otherwise it is the one that reaches MASTER_ADDR.
    """
    if "GLOO_SOCKET_IFNAME" in environ or "MASTER_ADDR" not in environ:
        return None
    return address_for_peers(environ["MASTER_ADDR"])


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _owned_addresses() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """(interface, address) for every address of this machine."""
    size = 64 * _IFREQ_BYTES
    while True:
        buffer = array.array("B", bytes(size))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            request = struct.pack("iP", size, buffer.buffer_info()[0])
            used = struct.unpack("iP", fcntl.ioctl(sock, _SIOCGIFCONF, request))[0]
        if used < size:
            break
        size *= 2  # the list may have been cut
    for start in range(0, used, _IFREQ_BYTES):
        entry = buffer[start : start + _IFREQ_BYTES].tobytes()
        label = entry[:16].rstrip(b"\0").decode()
        yield label.partition(":")[0], ipaddress.IPv4Address(entry[20:24])
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else ():
        digits, *_, name = line.split()
        yield name, ipaddress.IPv6Address(int(digits, 16))
