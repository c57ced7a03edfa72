"""`torsh run --host-discovery-script`: its options, and the hosts with which a job starts."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import typer

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.launch.spec import DiscoverySpec, ElasticSpec

if TYPE_CHECKING:
    from collections.abc import Mapping


def discovery_spec(script: str | None, *, slots_per_host: int | None, cooldown: str | None) -> DiscoverySpec | None:
    """How the hosts of a job are found; None if nobody looks for them."""
    if script is None:
        given = {"--slots-per-host": slots_per_host, "--host-cooldown": cooldown}
        idle = [name for name, value in given.items() if value is not None]
        if idle:
            raise InvalidArgument(
                f"{', '.join(idle)} without --host-discovery-script has no effect", hint="leave it out"
            )
        return None
    from torsh_distributed.launch.control.host_discovery import discovery_command

    return DiscoverySpec(
        command=discovery_command(script),
        default_slots=slots_per_host or 1,
        cooldown_s=None if cooldown is None else parse_cooldown(cooldown),
    )


def parse_cooldown(text: str) -> tuple[float, float]:
    """Least and most seconds of `MIN-MAX`."""
    least, _, most = text.partition("-")
    try:
        found = float(least), float(most)
    except ValueError:
        found = (0.0, 0.0)
    if not 0 < found[0] <= found[1] < float("inf"):
        raise InvalidArgument(
            "--host-cooldown must read MIN-MAX in seconds, MIN not above MAX", hint="for example 10-600", got=text
        )
    return found


def first_hosts(discovery: DiscoverySpec, elastic: ElasticSpec, wanted: int) -> dict[str, int]:
    """The hosts with which the job starts: once there are slots for `wanted` workers, all of them up to the most."""
    from torsh_distributed.launch.control.host_discovery import await_slots

    least = max(wanted, elastic.min_workers)
    if least > elastic.max_workers:
        raise InvalidArgument(
            f"the job starts with at least {least} workers, and may have at most {elastic.max_workers}",
            hint="lower --nproc-per-node (-np), or raise --max-workers (--max-np)",
        )
    hosts = await_slots(
        discovery,
        least,
        timeout_s=elastic.wait_timeout_s,
        say=lambda text: typer.echo(f"torsh run: {text}", err=True),
    )
    left, used = elastic.max_workers, {}
    for host, count in hosts.items():
        if min(left, count):
            used[host] = min(left, count)
            left -= used[host]
    return used


def are_here(hosts: Mapping[str, int]) -> bool:
    """Whether all hosts are this machine; if one is not, none may be called localhost."""
    from torsh_distributed.launch.control.host_discovery import LOOPBACK_NAMES, is_this_machine

    if all(is_this_machine(host) for host in hosts):
        return True
    loopback = next((host for host in hosts if host in LOOPBACK_NAMES), None)
    if loopback is not None:
        raise InvalidArgument(
            f"{loopback} means another machine on every host that the host discovery script names",
            hint=f"let it print the name by which the others reach it, such as {socket.gethostname()}",
            hosts=", ".join(f"{host}:{count}" for host, count in hosts.items()),
        )
    return False
