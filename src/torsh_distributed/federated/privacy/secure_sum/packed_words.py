"""Words of fewer than 32 bits, packed without gaps: what makes a masked upload smaller than float32."""

from __future__ import annotations

import numpy as np

from torsh_distributed.errors import SerializationError
from torsh_distributed.federated.privacy.secure_sum.mask_words import Words

_GROUP = 32
"""Words of one group: together they fill as many whole 32-bit units as a word has bits."""


def packed_bytes(num_words: int, bits: int) -> int:
    """The size of so many packed words."""
    return -(-num_words // _GROUP) * bits * 4


def pack_words(words: Words, bits: int) -> bytes:
    """The lowest `bits` of each word."""
    groups = np.zeros((-(-len(words) // _GROUP), _GROUP), dtype=np.uint64)
    groups.reshape(-1)[: len(words)] = words & np.uint32(2**bits - 1)
    units = np.zeros((len(groups), bits), dtype=np.uint64)
    for place in range(_GROUP):
        unit, shift = divmod(place * bits, 32)
        value = groups[:, place] << np.uint64(shift)
        units[:, unit] |= value & np.uint64(0xFFFFFFFF)
        if shift + bits > 32:
            units[:, unit + 1] |= value >> np.uint64(32)
    return units.astype("<u4").tobytes()


def unpack_words(data: bytes | memoryview, num_words: int, bits: int) -> Words:
    """What `pack_words` packed; SerializationError if the size is another."""
    if len(data) != packed_bytes(num_words, bits):
        raise SerializationError("packed words of another size", size=len(data), expected=packed_bytes(num_words, bits))
    units = np.frombuffer(data, dtype="<u4").reshape(-1, bits).astype(np.uint64)
    groups = np.empty((len(units), _GROUP), dtype=np.uint32)
    for place in range(_GROUP):
        unit, shift = divmod(place * bits, 32)
        value = units[:, unit] >> np.uint64(shift)
        if shift + bits > 32:
            value |= units[:, unit + 1] << np.uint64(32 - shift)
        groups[:, place] = value & np.uint64(2**bits - 1)
    return groups.reshape(-1)[:num_words].copy()
