"""`torsh run --host-discovery-script`: its options, and the hosts with which a job starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument
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
    return {host: count for host, count in hosts.items() if count}


def local_slots(hosts: Mapping[str, int], *, most: int) -> int:
    """Workers of a job on this machine alone; refused if a host is another one."""
    from torsh_distributed.launch.control.this_machine import is_this_machine

    others = [host for host in hosts if not is_this_machine(host)]
    if others:
        raise FeatureNotAvailable(
            f"the host discovery script names {others[0]}, which is not this machine",
            hint="let it print localhost and its slots, or name fixed hosts: --ssh --hosts a:4,b:4 (-H a:4,b:4)",
            hosts=", ".join(f"{host}:{count}" for host, count in hosts.items()),
        )
    return min(most, sum(hosts.values()))
