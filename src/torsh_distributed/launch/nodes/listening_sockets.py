"""Listening sockets, with errors that name the address, the port and the remedy."""

from __future__ import annotations

import dataclasses
import errno
import ipaddress
import socket

from torsh_distributed.comm.meeting.network_interface import address_for_peers
from torsh_distributed.errors import CommunicationError
from torsh_distributed.launch.spec import JobSpec

_MAX_UNIX_PATH_BYTES = 107


def resolve(address: str) -> tuple[socket.AddressFamily, str]:
    """Address family and numeric address of a name, IPv4 first."""
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise CommunicationError(
            f"the master address {address!r} cannot be resolved",
            hint="give --master-addr an address or a name that every node can look up",
            master_addr=address,
            reason=error.strerror or str(error),
        ) from error
    family, _, _, _, sockaddr = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, str(sockaddr[0])


def is_loopback(address: str) -> bool:
    """Whether a name or address can be reached from this machine only."""
    return ipaddress.ip_address(resolve(address)[1].partition("%")[0]).is_loopback


def with_reachable_master(spec: JobSpec) -> JobSpec:
    """The job with an address of node 0 that other nodes can reach, where its own name means loopback on node 0.

    Why: Debian gives a host's own name the address 127.0.1.1 in its /etc/hosts; other nodes look up the real one.
    """
    if not spec.spans_nodes or not spec.is_leader or spec.master_addr == "localhost" or _is_numeric(spec.master_addr):
        return spec
    if not is_loopback(spec.master_addr):
        return spec
    address = address_for_peers(spec.master_addr)
    if address is None:
        raise CommunicationError(
            f"the name {spec.master_addr!r} means {resolve(spec.master_addr)[1]} on this node, "
            "which others cannot reach",
            hint="give --master-addr the numeric address of this node on the network of the job",
            master_addr=spec.master_addr,
        )
    return dataclasses.replace(spec, master_addr=address)


def _is_numeric(address: str) -> bool:
    try:
        ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return True


def listen_on(address: str, port: int) -> socket.socket:
    """A socket listening on that address alone; port 0 takes a free one."""
    family, numeric = resolve(address)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((numeric, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            message, hint = (
                f"port {port} on {address} is in use",
                "another job may be running: choose another --master-port, or leave it out on one node",
            )
        elif error.errno == errno.EADDRNOTAVAIL:
            message, hint = (
                f"{address} is not an address of this node",
                "--master-addr is the address of node 0; other nodes need --node-rank",
            )
        else:
            message, hint = f"cannot listen on {address}:{port}", "choose a port above 1023 that this user may open"
        raise CommunicationError(
            message, hint=hint, master_addr=address, master_port=port, reason=error.strerror or str(error)
        ) from error
    return listener


def listen_in_range(address: str, ports: tuple[int, int], *, besides: int) -> socket.socket:
    """A socket listening on the first free port of the range, both ends included, but not on `besides`."""
    first, last = ports
    for port in range(first, last + 1):
        if port == besides:
            continue
        try:
            return listen_on(address, port)
        except CommunicationError as error:
            cause = error.__cause__
            if not isinstance(cause, OSError) or cause.errno != errno.EADDRINUSE:
                raise
    raise CommunicationError(
        f"no port of {first}-{last} on {address} is free",
        hint="widen --port-range: a job needs one port on node 0 for launchers, one for the store, and a few per rank",
        master_addr=address,
        port_range=f"{first}-{last}",
    )


def listen_on_path(path: str) -> socket.socket | None:
    """A Unix socket at a path in a directory of this user's own; None if the path is longer than the kernel takes."""
    if len(path.encode()) > _MAX_UNIX_PATH_BYTES:
        return None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise CommunicationError(
            f"cannot listen on {path}",
            hint="set TMPDIR to a directory on a local file system",
            path=path,
            reason=error.strerror or str(error),
        ) from error
    return listener
