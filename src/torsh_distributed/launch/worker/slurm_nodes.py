"""SLURM's compressed lists: `gpu[007-012,20],login` for nodes, `4(x2),1` for tasks on each of them."""

from __future__ import annotations

import itertools
import re

from torsh_distributed.errors import ConfigurationError

_MOST_NODES = 100_000
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_nodes(nodelist: str) -> list[str]:
    """Every node of the list in its order: names with any number of bracketed ranges, leading zeros kept."""
    return [name for part in _split(nodelist.strip(), nodelist) for name in _expand_name(part, nodelist)]


def expand_tasks(counts: str) -> list[int]:
    """Tasks on each node of the step: `4(x2),1` gives 4, 4, 1."""
    found: list[int] = []
    for part in counts.split(","):
        match = _TASKS.fullmatch(part.strip())
        if match is None:
            raise ConfigurationError(
                "SLURM's tasks per node cannot be read", hint="they read like 4(x2),1", SLURM_TASKS_PER_NODE=counts
            )
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _split(text: str, nodelist: str) -> list[str]:
    """The names between commas that are outside brackets."""
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise _unreadable(nodelist)
        if char == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    if depth:
        raise _unreadable(nodelist)
    parts.append(text[start:])
    if not all(parts):
        raise _unreadable(nodelist)
    return parts


def _expand_name(name: str, nodelist: str) -> list[str]:
    """`rack[1-2]n[01,03]` gives rack1n01, rack1n03, rack2n01, rack2n03."""
    pieces = re.split(r"\[([^\]]*)\]", name)
    choices = [[piece] if index % 2 == 0 else _expand_range(piece, nodelist) for index, piece in enumerate(pieces)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _expand_range(text: str, nodelist: str) -> list[str]:
    numbers = []
    for part in text.split(","):
        first, separator, last = part.partition("-")
        if not first.isdigit() or (separator and not last.isdigit()):
            raise _unreadable(nodelist)
        end = int(last or first)
        if not 0 <= end - int(first) < _MOST_NODES:
            raise _unreadable(nodelist)
        numbers += [f"{number:0{len(first)}}" for number in range(int(first), end + 1)]
    return numbers


def _unreadable(nodelist: str) -> ConfigurationError:
    return ConfigurationError(
        "the SLURM node list cannot be read",
        hint="export MASTER_ADDR with the name of the first node",
        SLURM_JOB_NODELIST=nodelist,
    )
