"""Draws of elements from a seed that all ranks share, so no indices travel.

Everything is integer arithmetic on `noise`: the same elements on every device and every rank.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor
from typing_extensions import override

from torsh_distributed.compress.codecs.base import Key
from torsh_distributed.compress.codecs.linear.base import LinearCodec, require_floats
from torsh_distributed.compress.codecs.sparse.selection import require_share, share_of
from torsh_distributed.compress.kernels.noise import mixed, noise
from torsh_distributed.compress.messages.indices import nonzero
from torsh_distributed.errors import InvalidArgument


class DrawnCodec(LinearCodec):
    """Send a `share` of the elements, drawn for each key; the others count as 0.

    On average that share of |x|² arrives, for any `x`; error feedback carries the rest over. No indices travel: every
    rank draws the same. Subclasses choose them in `draw`.
    """

    def __init__(self, share: float = 0.1) -> None:
        super().__init__(share)
        self.share = require_share(share)
        self._drawn: tuple[tuple[object, ...], Tensor] | None = None

    @abstractmethod
    def draw(self, seed: int, num_elements: int, device: torch.device) -> Tensor:
        """The indices of the elements to send, all different: int64."""

    @override
    def encode(self, x: Tensor, key: Key) -> Tensor:
        return x[self._draw(x.numel(), key, x.device)]

    @override
    def decode(self, payload: Tensor, num_elements: int, key: Key) -> Tensor:
        indices = self._draw(num_elements, key, payload.device)
        require_floats(self, payload, indices.numel())
        return payload.new_zeros(num_elements).index_copy_(0, indices, payload)

    def _draw(self, num_elements: int, key: Key, device: torch.device) -> Tensor:
        """The indices for this key; the last ones are kept, because an average needs them three times."""
        asked = (key.shared, num_elements, device)
        if self._drawn is None or self._drawn[0] != asked:
            self._drawn = asked, self.draw(key.shared, num_elements, device)
        return self._drawn[1]


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


class BernoulliCodec(DrawnCodec):
    """Send each element with probability `share`, independently.

    Payload: as many fp32 values as were drawn, share·n on average, and nothing else.
    """

    name = "bernoulli"

    @override
    def draw(self, seed: int, num_elements: int, device: torch.device) -> Tensor:
        return draw_each(seed, num_elements, self.share, device)

    @override
    def payload_bytes(self, num_elements: int) -> int | None:
        return 0 if num_elements == 0 else None


class ScaledBernoulliCodec(BernoulliCodec):
    """Bernoulli with decoded values divided by the probability: unbiased, for training without error feedback.

    Not for error feedback: residuals would be 1/share - 1 times as large as what is sent, and grow.
    """

    @override
    def decode(self, payload: Tensor, num_elements: int, key: Key) -> Tensor:
        return super().decode(payload, num_elements, key).mul_(2**32 / acceptance(self.share))


class RandomKCodec(DrawnCodec):
    """Send k = max(1, round(share·n)) elements, drawn without replacement.

    Payload: k fp32 values, and nothing else.
    """

    name = "randomk"

    @override
    def draw(self, seed: int, num_elements: int, device: torch.device) -> Tensor:
        return draw_without_replacement(seed, num_elements, share_of(self.share, num_elements), device)

    @override
    def payload_bytes(self, num_elements: int) -> int:
        return 4 * share_of(self.share, num_elements)


class ScaledRandomKCodec(RandomKCodec):
    """RandomK with decoded values multiplied by n/k: unbiased, for training without error feedback.

    Not for error feedback: residuals would be n/k - 1 times as large as what is sent, and grow.
    """

    @override
    def decode(self, payload: Tensor, num_elements: int, key: Key) -> Tensor:
        return super().decode(payload, num_elements, key).mul_(num_elements / max(1, payload.numel()))
