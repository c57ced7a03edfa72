"""The one source of randomness of the codecs: a hash of a key and an element's index.

    noise(key, i) = mixed(i * 0x9E3779B9 + key)          32 bits, all arithmetic modulo 2**32
    mixed(h):  h = (h ^ h >> 16) * 0x21F0AAAD;  h = (h ^ h >> 15) * 0x735A2D97;  h ^ h >> 15
    uniform(key, i) = (noise(key, i) >> 8) / 2**24       in [0, 1), exact in single precision

Why a hash and not a generator: element i draws the same number on every device, in any order and however the work is
split, so C, torch and CUDA write the same bytes. Multiples of an odd constant visit all 2**32 numbers before one
repeats; `mixed` is a bijection that removes the pattern. `native/kernels.h` has the same in C.
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
    """The input of `mixed` for element `start`, as a signed 32-bit number."""
    return _signed(start * _GOLDEN + key)


def uniform(key: int, start: int, num_elements: int, device: torch.device) -> Tensor:
    """A number from [0, 1) for each element from `start` on, fp32."""
    return (noise(key, start, num_elements, device) >> 8 & 0xFFFFFF).float() * 2.0**-24


def checksum(words: Tensor) -> int:
    """The sum of noise(word i, i) modulo 2**32: a changed word changes its term, and swapped words change two.

    Why not a CRC: a sum is the same in any order, so a GPU computes it in parallel and a core in vectors.
    """
    index = torch.arange(words.numel(), dtype=torch.int32, device=words.device)
    return int(mixed(index * _GOLDEN + words).sum(dtype=torch.int64)) & 0xFFFFFFFF


def mixed(bits: Tensor) -> Tensor:
    """A bijection of 32 bits, on int32. Shifts of negative numbers fill with ones; the masks drop them."""
    bits = (bits ^ (bits >> 16 & 0xFFFF)) * 0x21F0AAAD
    bits = (bits ^ (bits >> 15 & 0x1FFFF)) * 0x735A2D97
    return bits ^ (bits >> 15 & 0x1FFFF)


def _signed(number: int) -> int:
    return (number + 2**31) % 2**32 - 2**31
