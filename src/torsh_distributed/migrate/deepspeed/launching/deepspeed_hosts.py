"""Which slots of which hosts a DeepSpeed job uses: the hostfile, then `--include`, `--exclude` and the numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from torsh_distributed.errors import InvalidArgument, IoError

Resources = dict[str, list[int]]
"""Host to the slots that are used there."""

_LINE = re.compile(r"(\S+)\s+slots=([0-9]{1,5})\s*$")


def read_resources(path: str) -> Resources:
    """The hosts of a hostfile: lines such as `node1 slots=4`; a duplicate or another line is an error."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise IoError("the hostfile cannot be read", path=path, reason=str(error)) from error
    found: Resources = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _LINE.match(text)
        if match is None or int(match[2]) < 1:
            raise InvalidArgument("a line of a hostfile reads: HOST slots=N", path=path, line=number, got=line.strip())
        if match[1] in found:
            raise InvalidArgument(f"the hostfile names {match[1]} twice", path=path, line=number)
        found[match[1]] = list(range(int(match[2])))
    if not found:
        raise InvalidArgument("the hostfile names no host", path=path)
    return found


def parse_filter(text: str, option: str) -> dict[str, list[int] | None]:
    """`host:0,2@other`: hosts with their slots, or None for all of a host."""
    found: dict[str, list[int] | None] = {}
    for part in text.split("@"):
        host, has_slots, slots = part.strip().partition(":")
        numbers = slots.split(",")
        if not host or (has_slots and not all(one.strip().isdigit() for one in numbers)):
            raise InvalidArgument(f"{option} takes hosts with slots, such as node1:0,2@node2", got=text)
        found[host] = sorted({int(one) for one in numbers}) if has_slots else None
    return found


def include(resources: Mapping[str, list[int]], wanted: Mapping[str, list[int] | None]) -> Resources:
    """Only the hosts and slots that are wanted; one that is not there is an error."""
    chosen: Resources = {}
    for host, slots in wanted.items():
        known = _known(resources, host)
        chosen[host] = known if slots is None else _checked(host, slots, known)
    return chosen


def exclude(resources: Mapping[str, list[int]], unwanted: Mapping[str, list[int] | None]) -> Resources:
    """All but these hosts and slots."""
    left = {host: list(slots) for host, slots in resources.items()}
    for host, slots in unwanted.items():
        known = _known(resources, host)
        gone = known if slots is None else _checked(host, slots, known)
        left[host] = [slot for slot in left[host] if slot not in gone]
    return {host: slots for host, slots in left.items() if slots}


def _known(resources: Mapping[str, list[int]], host: str) -> list[int]:
    if host not in resources:
        raise InvalidArgument(f"Hostname '{host}' not found in hostfile", hosts=list(resources))
    return list(resources[host])


def _checked(host: str, slots: list[int], known: list[int]) -> list[int]:
    for slot in slots:
        if slot not in known:
            raise InvalidArgument(f"No slot '{slot}' specified on host '{host}'", slots=known)
    return slots
