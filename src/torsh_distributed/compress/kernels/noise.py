"""The one source of randomness of the codecs: a hash of a key and an element's index.

    noise(key, i) = mixed(i * 0x9E3779B9 + key)          32 bits, all arithmetic modulo 2**32
    mixed(h):  h = (h ^ h >> 16) * 0x21F0AAAD;  h = (h ^ h >> 15) * 0x735A2D97;  h ^ h >> 15
    uniform(key, i) = (noise(key, i) >> 8) / 2**24       in [0, 1), exact in single precision

Why a hash and no generator: element i draws the same number on every device, in every order and every cut of the
work, so that C, torch and CUDA write the same bytes. The steps of an odd constant visit all 2**32 numbers before one
comes twice; `mixed` is a bijection that leaves no pattern in them. `native/kernels.h` has the same in C.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B9 - 2**32  # signed, as torch's 32-bit integers are


def noise(key: int, start: int, num_elements: int, device: torch.device) -> Tensor:
    """32 random bits for each element from `start` on, as int32."""
    steps = torch.arange(num_elements, dtype=torch.int32, device=device) * _GOLDEN
    return mixed(steps + first_bits(key, start))


def first_bits(key: int, start: int) -> int:
    """What element `start` is mixed from, as a signed number of 32 bits."""
    return _signed(start * _GOLDEN + key)


def uniform(key: int, start: int, num_elements: int, device: torch.device) -> Tensor:
    """A number from [0, 1) for each element from `start` on, fp32."""
    return (noise(key, start, num_elements, device) >> 8 & 0xFFFFFF).float() * 2.0**-24


def checksum(words: Tensor) -> int:
    """The sum of noise(word i, i) modulo 2**32: any changed word changes its term, and words cannot change places.

    Why not a CRC: a sum is the same in any order, so a device adds it up in parallel and a core in vectors.
    """
    index = torch.arange(words.numel(), dtype=torch.int32, device=words.device)
    return int(mixed(index * _GOLDEN + words).sum(dtype=torch.int64)) & 0xFFFFFFFF


def mixed(bits: Tensor) -> Tensor:
    """A bijection of 32 bits, on int32. Shifts of negative numbers bring ones in from above; the masks drop them."""
    bits = (bits ^ (bits >> 16 & 0xFFFF)) * 0x21F0AAAD
    bits = (bits ^ (bits >> 15 & 0x1FFFF)) * 0x735A2D97
    return bits ^ (bits >> 15 & 0x1FFFF)


def _signed(number: int) -> int:
    return (number + 2**31) % 2**32 - 2**31
