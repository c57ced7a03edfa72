"""Sizes of memory as people write them."""

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
