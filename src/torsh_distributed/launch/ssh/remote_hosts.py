"""The hosts of `--hosts a:4,b:4`: where launchers are started, and with how many workers."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument

# No blank, no quote, and no dash in front: it becomes an argument of ssh.
_HOST = re.compile(r"(?:[A-Za-z0-9_.][A-Za-z0-9_.+-]*@)?(?:[A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.%A-Za-z0-9]+\])")


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteHost:
    """One host of a job."""

    target: str
    """As ssh takes it: a name of its configuration, `name`, `user@name` or `user@address`."""

    num_workers: int | None = None
    """Workers there; None takes --nproc-per-node."""


def parse_hosts(text: str) -> tuple[RemoteHost, ...]:
    """Hosts of `a:4,user@b:4,[fd00::1]:4`; raises InvalidArgument for anything else, and for a host named twice."""
    hosts = tuple(_parse_host(part.strip()) for part in text.split(","))
    targets = [host.target for host in hosts]
    twice = next((target for target in targets if targets.count(target) > 1), None)
    if twice is not None:
        raise InvalidArgument(
            f"the host {twice!r} is named twice", hint=f"name it once, with all its workers: {twice}:N", hosts=text
        )
    return hosts


def _parse_host(text: str) -> RemoteHost:
    target, separator, count = text.rpartition(":")
    if not separator or (text.endswith("]") and "[" in text):
        target, count = text, ""
    if not _HOST.fullmatch(target) or (separator and target != text and not count.isdigit()) or count == "0":
        raise InvalidArgument(
            "hosts must read NAME:WORKERS with commas between them",
            hint="for example --hosts a:4,b:4; an IPv6 address goes in brackets: [fd00::1]:4",
            host=text,
        )
    return RemoteHost(target=target, num_workers=int(count) if count else None)


def workers_per_host(hosts: tuple[RemoteHost, ...], default: int) -> int:
    """The number of workers on every host; raises FeatureNotAvailable where hosts differ."""
    counts = {host.target: host.num_workers or default for host in hosts}
    if len(set(counts.values())) > 1:
        raise FeatureNotAvailable(
            "all hosts of a job have the same number of workers",
            hint="give every host the same number",
            hosts=",".join(f"{target}:{count}" for target, count in counts.items()),
        )
    return next(iter(counts.values()))
