"""Names, ports, interfaces and buffers of this machine."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from torsh_distributed.comm.meeting.network_interface import address_for_peers, interface_of, outward_address
from torsh_distributed.known_variables import DEFAULT_MASTER_PORT
from torsh_distributed.observe.machine.diagnostic_result import CheckSeverity, DiagnosticResult

PORTS = range(DEFAULT_MASTER_PORT, DEFAULT_MASTER_PORT + 11)
_ADVISED_BUFFER_BYTES = 16 << 20


def check_network(environ: Mapping[str, str]) -> Iterator[DiagnosticResult]:
    """Everything about the network that can be seen from here."""
    yield _own_name()
    yield _ports(environ)
    yield from _interfaces(environ)
    yield from _master(environ)
    yield _buffers()


def _own_name() -> DiagnosticResult:
    name = socket.gethostname()
    try:
        found = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError as error:
        return DiagnosticResult(
            check_name="host name",
            severity=CheckSeverity.WARNING,
            description=f"{name} does not resolve: {error.strerror or error}",
            reason="backends that look up the machine's own name fail or wait for DNS",
            remediation=f"add {name} to /etc/hosts with its address",
        )
    is_loopback = all(ipaddress.ip_address(one.partition("%")[0]).is_loopback for one in found)
    outward = outward_address()
    if is_loopback and outward is not None:
        return DiagnosticResult(
            check_name="host name",
            severity=CheckSeverity.NOTE,
            description=f"{name} resolves to loopback ({', '.join(found)})",
            reason="gloo alone would listen there, out of reach of other nodes; `torsh run` names the interface to it",
            remediation=f"for other launchers set GLOO_SOCKET_IFNAME={interface_of(outward) or 'eth0'}, "
            f"or give {name} the address {outward} in /etc/hosts",
            data={"addresses": found, "outward": outward},
        )
    return DiagnosticResult(
        check_name="host name", description=f"{name} is {', '.join(found)}", data={"addresses": found}
    )


def _ports(environ: Mapping[str, str]) -> DiagnosticResult:
    wanted = sorted({*PORTS, *([int(environ["MASTER_PORT"])] if environ.get("MASTER_PORT", "").isdigit() else [])})
    taken = [port for port in wanted if 0 < port < 65536 and not _is_free(port)]
    if not taken:
        return DiagnosticResult(check_name="ports", description=f"ports {wanted[0]} to {wanted[-1]} are free")
    return DiagnosticResult(
        check_name="ports",
        severity=CheckSeverity.WARNING,
        description=f"port {', '.join(map(str, taken))} is taken",
        reason=f"{DEFAULT_MASTER_PORT} is where launchers meet by default: another job runs, or one did not end",
        remediation="give --master-port, end the other program (`ss -ltnp`), or leave the choice to `torsh run`",
        data={"taken": taken},
    )


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
            sock.listen(1)
        except OSError:
            return False
    return True


def _interfaces(environ: Mapping[str, str]) -> Iterator[DiagnosticResult]:
    names = [name for _, name in socket.if_nameindex()]
    outward = outward_address()
    chosen = interface_of(outward) if outward is not None else None
    yield DiagnosticResult(
        check_name="interfaces",
        description=f"{', '.join(names) or 'none'}; jobs on several nodes use {chosen or 'none: there is no way out'}",
        data={"names": names, "chosen": chosen},
    )
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = environ.get(variable, "")
        given = [part for part in value.lstrip("=^").split(",") if part]
        is_exact = variable.startswith("GLOO") or value.startswith("=")
        absent = [one for one in given if not any(name == one if is_exact else name.startswith(one) for name in names)]
        if absent and not value.startswith("^"):
            yield DiagnosticResult(
                check_name=variable,
                severity=CheckSeverity.ERROR,
                description=f"{variable}={value}, but there is no interface {', '.join(absent)}",
                reason="the backend fails when it opens its first connection",
                remediation=f"use one of {', '.join(names)}, or unset it",
            )


def _master(environ: Mapping[str, str]) -> Iterator[DiagnosticResult]:
    master = environ.get("MASTER_ADDR")
    if not master:
        return
    try:
        socket.getaddrinfo(master, None)
    except OSError as error:
        yield DiagnosticResult(
            check_name="MASTER_ADDR",
            severity=CheckSeverity.ERROR,
            description=f"{master} does not resolve: {error.strerror or error}",
            reason="no rank can meet the others",
            remediation="use an address, or a name that DNS or /etc/hosts knows on every node",
        )
        return
    if address_for_peers(master) is None:
        yield DiagnosticResult(
            check_name="MASTER_ADDR",
            severity=CheckSeverity.ERROR,
            description=f"there is no route to {master}",
            reason="no rank of this machine can meet the others",
            remediation="check the interface and the routes (`ip route get`)",
        )


def _buffers() -> DiagnosticResult:
    sizes = {}
    for name in ("rmem_max", "wmem_max"):
        path = Path(f"/proc/sys/net/core/{name}")
        if path.exists():
            sizes[name] = int(path.read_text())
    small = {name: size for name, size in sizes.items() if size < _ADVISED_BUFFER_BYTES}
    if not small:
        return DiagnosticResult(check_name="TCP buffers", description="at least 16 MiB, or not to be seen", data=sizes)
    return DiagnosticResult(
        check_name="TCP buffers",
        severity=CheckSeverity.NOTE,
        description=", ".join(f"net.core.{name} = {size}" for name, size in small.items()),
        reason="on a fast or distant link one connection cannot fill it; on one machine it does not matter",
        remediation=f"sysctl -w {' '.join(f'net.core.{name}={_ADVISED_BUFFER_BYTES}' for name in small)}",
        data=sizes,
    )
