"""Draws of elements from a seed that all ranks share, so no indices travel.

Everything is integer arithmetic on `noise`: the same elements on every device and every rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torsh_distributed.compress.kernels.noise import mixed, noise
from torsh_distributed.compress.messages.indices import nonzero
from torsh_distributed.errors import InvalidArgument

_ROUNDS = 4
_PIECE = 1 << 16  # elements drawn at a time on a CPU, so the hash works in the cache


def draw_without_replacement(seed: int, num_elements: int, count: int, device: torch.device) -> Tensor:
    """`count` different indices below `num_elements`, in random order: int64.

    They are the images of 0, 1, 2, … under a random permutation: a Feistel network on just enough bits, applied again
    to what falls outside. So the cost grows with `count`, not with `num_elements`.
    """
    if num_elements > 2**31:
        raise InvalidArgument(
            "elements can be drawn from at most 2**31",
            hint="split the gradient into smaller buckets",
            num_elements=num_elements,
        )
    bits = max(num_elements - 1, 1).bit_length()
    pieces = [torch.empty(0, dtype=torch.int32, device=device)]
    for start, length in pieces_of(count, device):
        numbers = torch.arange(start, start + length, dtype=torch.int32, device=device)
        pieces.append(_permuted_inside(numbers, seed, bits, num_elements))
    return torch.cat(pieces).long()


def _permuted_inside(numbers: Tensor, seed: int, bits: int, num_elements: int) -> Tensor:
    """The numbers permuted; those that leave the range are permuted again until they are back in it."""
    numbers = _permuted(numbers, seed, bits)
    outside = nonzero(numbers > num_elements - 1)
    while outside.numel():
        moved = _permuted(numbers[outside], seed, bits)
        numbers[outside] = moved
        outside = outside[moved > num_elements - 1]
    return numbers


def _permuted(numbers: Tensor, seed: int, bits: int) -> Tensor:
    """A bijection of `bits` bits: in each round either half is changed by a hash of the other."""
    low_bits = bits // 2 + bits % 2
    low, high = numbers & (1 << low_bits) - 1, numbers >> low_bits
    for turn in range(_ROUNDS):
        key = _signed(seed + 0x632BE59B * (turn + 1))
        low = low ^ mixed(high * 0x2545F491 + key) & (1 << low_bits) - 1
        key = _signed(seed - 0x632BE59B * (turn + 1))
        high = high ^ mixed(low * 0x2545F491 + key) & (1 << bits - low_bits) - 1
    return high << low_bits | low


def _signed(number: int) -> int:
    return (number + 2**31) % 2**32 - 2**31


def pieces_of(num_elements: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Start and length of the pieces in which elements are drawn: small on a CPU, one elsewhere."""
    step = _PIECE if device.type == "cpu" else max(1, num_elements)
    for start in range(0, num_elements, step):
        yield start, min(step, num_elements - start)


def draw_each(seed: int, num_elements: int, probability: float, device: torch.device) -> Tensor:
    """Indices of elements drawn independently with `probability`, in multiples of 2**-32: int64, increasing."""
    last = acceptance(probability) - 1 - 2**31  # the hash is uniform over all signed 32-bit numbers
    pieces = [torch.empty(0, dtype=torch.int64, device=device)]
    for start, length in pieces_of(num_elements, device):
        pieces.append(nonzero(noise(seed, start, length, device) <= last) + start)
    return torch.cat(pieces)


def acceptance(probability: float) -> int:
    """How many of 2**32 equally likely numbers draw an element: at least one."""
    return max(1, round(probability * 2**32))
