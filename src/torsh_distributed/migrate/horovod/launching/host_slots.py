"""Hosts and slots of a Horovod job, as our nodes and workers; imports no torch."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument, IoError
from torsh_distributed.launch.control.host_discovery import LOOPBACK_NAMES, is_this_machine


@dataclass(frozen=True, slots=True)
class HostSlots:
    """A host, and how many workers it takes."""

    host: str
    slots: int


def parse_hosts(text: str) -> list[HostSlots]:
    """`host:slots,host:slots`; one slot where none are given."""
    found = []
    for part in text.split(","):
        host, _, count = part.strip().rpartition(":") if ":" in part else (part.strip(), "", "1")
        if not host or not count.isdigit() or int(count) < 1:
            raise InvalidArgument(
                "-H takes hosts with slots, such as node1:4,node2:4", hint="slots are whole numbers", hosts=text
            )
        found.append(HostSlots(host, int(count)))
    return _merged(found)


def read_hostfile(path: str) -> list[HostSlots]:
    """Lines such as `node1 slots=4`; blank lines and `#` comments are skipped."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise IoError("the hostfile cannot be read", path=path, reason=str(error)) from error
    found = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        slots = 1
        for word in words[1:]:
            key, _, value = word.partition("=")
            if key != "slots" or re.fullmatch("[0-9]{1,5}", value) is None or int(value) < 1:
                raise InvalidArgument(
                    "a line of a hostfile reads: HOST slots=N", path=path, line=number, got=line.strip()
                )
            slots = int(value)
        found.append(HostSlots(words[0], slots))
    if not found:
        raise InvalidArgument("the hostfile names no host", path=path)
    return _merged(found)


def _merged(hosts: Sequence[HostSlots]) -> list[HostSlots]:
    slots: dict[str, int] = {}
    for one in hosts:
        slots[one.host] = slots.get(one.host, 0) + one.slots
    return [HostSlots(host, count) for host, count in slots.items()]


def node_options(hosts: Sequence[HostSlots], num_proc: int | None, *, by_hand: bool = False) -> list[str]:
    """Options of `torsh run` for these hosts and so many ranks; None takes all slots.

    One host that is this machine is one node. Others are entered over SSH, as their own launchers do. With `by_hand`
    the user starts the same line on each of several hosts: this machine must be one. All have the same number of
    workers.
    """
    total = sum(one.slots for one in hosts)
    wanted = total if num_proc is None else num_proc
    if wanted > total:
        raise InvalidArgument(
            f"-np {wanted} is above the {total} slots of the hosts",
            hint="give the hosts more slots, or lower -np",
            slots=total,
        )
    used = _used(hosts, wanted)
    if len(used) == 1 and is_this_machine(used[0].host):
        return ["--nproc-per-node", str(used[0].slots)]
    if len({one.slots for one in used}) > 1:
        raise FeatureNotAvailable(
            "every node of a job has the same number of workers",
            hint="give every host the same slots, and -np a multiple of them",
            hosts=", ".join(f"{one.host}:{one.slots}" for one in used),
        )
    return _nodes_by_hand(used) if by_hand else _nodes_over_ssh(used)


def _nodes_over_ssh(used: Sequence[HostSlots]) -> list[str]:
    loopback = next((one.host for one in used if one.host in LOOPBACK_NAMES), None)
    if loopback is not None:
        raise InvalidArgument(
            f"{loopback} means another machine on every host of the list",
            hint=f"write the name by which the others reach it, such as {socket.gethostname()}",
            hosts=[one.host for one in used],
        )
    return ["--ssh", "--hosts", ",".join(f"{one.host}:{one.slots}" for one in used)]


def _nodes_by_hand(used: Sequence[HostSlots]) -> list[str]:
    here = [index for index, one in enumerate(used) if is_this_machine(one.host)]
    if len(here) != 1:
        raise FeatureNotAvailable(
            "no host of the list is this machine" if not here else "two hosts of the list are this machine",
            hint="run the same command on every host, or leave out --token-file and --node-rank: then SSH is used",
            hosts=[one.host for one in used],
            this_machine=socket.gethostname(),
        )
    return [
        *("--nproc-per-node", str(used[0].slots)),
        *("--nnodes", str(len(used))),
        *("--node-rank", str(here[0])),
        *("--master-addr", used[0].host),
    ]


BY_HAND = frozenset({"--token-file", "--no-token", "--node-rank"})
"""Options of `torsh run` that only a user who starts every node needs: with one of them, SSH is not used."""


def _used(hosts: Sequence[HostSlots], wanted: int) -> list[HostSlots]:
    """The slots that are filled, host by host."""
    used = []
    for one in hosts:
        if wanted <= 0:
            break
        used.append(HostSlots(one.host, min(one.slots, wanted)))
        wanted -= one.slots
    return used
