"""Durations as people and batch systems write them."""

from __future__ import annotations

import re

from torsh_distributed.errors import InvalidArgument

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", re.IGNORECASE)
_FACTORS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_memory(text: str) -> int:
    """Bytes of `8G`, `512M`, `1.5T`; units are powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    size = float(match[1]) * _FACTORS[match[2].upper()] if match is not None else 0.0
    if not 1 <= size < 2**63:
        raise InvalidArgument(f"{text!r} is no amount of memory", hint="write it like 8G, 512M or 1.5T")
    return int(size)


_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):(\d{2})(?::(\d{2}))?")


def parse_duration(text: str) -> float:
    """Seconds of `90`, `90s`, `15m`, `12h`, `2d`, `HH:MM`, `HH:MM:SS` or `D-HH:MM:SS`."""
    number, unit = text.strip(), "s"
    if number and number[-1] in _UNITS_S:
        number, unit = number[:-1], number[-1]
    try:
        value = float(number) * _UNITS_S[unit]
    except ValueError:
        value = -1.0
    clock = _CLOCK.fullmatch(text.strip())
    if clock is not None:
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        value = float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    if not 0 < value < float("inf"):
        raise InvalidArgument(
            f"{text!r} is no duration", hint="a positive number of seconds, or like 90s, 15m, 12h, 2d, 12:00:00"
        )
    return value


def clock_time(seconds: float) -> str:
    """The duration as SLURM and PBS take it, `D-HH:MM:SS`, rounded up."""
    whole = int(-(-seconds // 1))
    minutes, secs = divmod(whole, 60)
    hours, mins = divmod(minutes, 60)
    days, hrs = divmod(hours, 24)
    return f"{f'{days}-' if days else ''}{hrs:02}:{mins:02}:{secs:02}"
