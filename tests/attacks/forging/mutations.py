"""Ways to make a file bad: values that do not belong where they stand, and bytes that were never written."""

from __future__ import annotations

import copy
import math
import os
import random
from pathlib import Path
from typing import Any

OUTSIDE = ("../../private.txt", "../private.txt", "/etc/hostname", "..", ".", "", "a/../../../private.txt", "\0", "~")
"""Names that lead out of a directory, from one that is two levels below the private file."""


def evil_value(draw: random.Random, private: Path) -> Any:
    """A value that a reader does not expect."""
    deep: Any = []
    for _ in range(draw.choice([3, 150])):
        deep = [deep]
    return draw.choice(
        [
            *OUTSIDE,
            str(private),
            os.path.relpath(private, private.parent / "case" / "step"),
            "x" * 5000,
            "\x1b]0;owned\x07\x1b[31m[/red][bold]",
            "[/nothing]",
            -1,
            0,
            1,
            2**31,
            2**40,
            2**62,
            2**63,
            10**400,
            -(2**70),
            1.5,
            -0.0,
            math.nan,
            math.inf,
            1e308,
            True,
            None,
            [],
            {},
            [0],
            [-1, 2**40],
            {"a": 1},
            [[1, 2], [3]],
            deep,
            "float32",
            "uint8",
            "Tensor",
            "é\ud7ff",
        ]
    )


def mutated(value: Any, draw: random.Random, private: Path) -> Any:
    """A copy of nested values, with one to three of them replaced, removed, doubled or moved."""
    value = copy.deepcopy(value)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        value = _once(value, draw, private)
    return value


def _once(value: Any, draw: random.Random, private: Path) -> Any:
    places = list(_places(value))
    if not places:
        return evil_value(draw, private)
    holder, key = draw.choice(places)
    how = draw.randrange(6)
    if how == 0:
        del holder[key]
    elif how == 1 and isinstance(holder, dict):
        name = evil_value(draw, private)
        holder[name if isinstance(name, str) else "new"] = holder[key]
    elif how == 1:
        holder.insert(key, holder[key])
    elif how == 2 and isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
        holder[key] = holder[key] + draw.choice([-1, 1, 8, -8, 64, 2**20])
    else:
        other, name = draw.choice(places)
        holder[key] = copy.deepcopy(other[name]) if how == 3 and name in _keys(other) else evil_value(draw, private)
    return value


def _keys(holder: Any) -> Any:
    return holder if isinstance(holder, dict) else range(len(holder))


def _places(value: Any) -> Any:
    """Every place in nested dicts and lists, as its holder and key."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield value, key
            yield from _places(part)
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield value, number
            yield from _places(part)


def damaged_bytes(data: bytes, draw: random.Random) -> bytes:
    """Bytes with some flipped, cut off, added, repeated, or replaced by others."""
    found = bytearray(data)
    how = draw.randrange(6)
    if how == 0 and found:
        for _ in range(draw.choice([1, 5, 50])):
            found[draw.randrange(len(found))] = draw.randrange(256)
    elif how == 1 and found:
        del found[draw.randrange(len(found)) :]
    elif how == 2:
        found += draw.randbytes(draw.randrange(1, 64))
    elif how == 3:
        found = bytearray(draw.randbytes(draw.randrange(200)))
    elif how == 4 and found:
        at = draw.randrange(len(found))
        found[at:at] = found[draw.randrange(len(found)) :][:200]
    else:
        found = bytearray(draw.choice([b"", b"{", b"null", b"[" * 100_000, b"\xff\xfe", b"\n" * 50, b"0" * 9000]))
    return bytes(found)


def replaced_file(path: Path, draw: random.Random, private: Path) -> None:
    """In place of a file: a link out of the directory, a pipe, a directory, or nothing."""
    path.unlink()
    how = draw.randrange(4)
    if how == 0:
        path.symlink_to(private)
    elif how == 1:
        os.mkfifo(path)
    elif how == 2:
        path.mkdir()
