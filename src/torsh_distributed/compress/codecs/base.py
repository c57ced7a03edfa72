"""Codec, the interface: encode a gradient in fewer bytes, decode it, and average the ranks' messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch.distributed as dist
from torch import Tensor

from torsh_distributed.compress.messages.sparse import Vector, dense

_GOLDEN = 0x9E3779B9  # 2**32 / golden ratio: neighbouring numbers end up far apart


class Key(NamedTuple):
    """The seed of a codec's randomness: the same key gives the same bytes, on every device and in every run."""

    seed: int = 0
    step: int = 0
    stream: int = 0
    """Which tensor of the step: a bucket or a parameter."""
    rank: int = 0

    @property
    def shared(self) -> int:
        """32 bits that are the same on all ranks, for choices they must make alike."""
        return _mixed(_mixed(_mixed(self.seed) ^ self.step) ^ self.stream)

    @property
    def own(self) -> int:
        """32 bits of this rank alone, for rounding that must be independent between ranks."""
        return _mixed(self.shared ^ (self.rank + 1) * _GOLDEN)


class Averaged:
    """The result of an average over ranks. A sparse codec returns sparse vectors, which take fewer passes."""

    def __init__(self, mean: Vector, sent: Vector, num_bytes: int) -> None:
        self.mean_vector = mean
        self.sent_vector = sent
        self.num_bytes = num_bytes
        """Bytes of payload this rank sent to others, as the codec counts them."""

    @property
    def mean(self) -> Tensor:
        """The mean over the ranks of what they sent: 1-D, fp32, the same bits on every rank."""
        return dense(self.mean_vector)

    @property
    def sent(self) -> Tensor:
        """What this rank's message decodes to; error feedback carries `x - sent` over."""
        return dense(self.sent_vector)


class Codec(ABC):
    """One way to send a gradient in fewer bytes. A codec with state keeps it by `key.stream`.

    `x` is 1-D, contiguous, fp32 and finite, on any device; it may be empty. Everything that decoding needs beside
    `num_elements` and the key is in the payload.
    """

    name: ClassVar[str]
    """As in a plan: `int8`, `topk`."""

    is_deterministic: ClassVar[bool]
    """Whether the payload depends on `x` alone, not on the key."""

    @abstractmethod
    def encode(self, x: Tensor, key: Key) -> Tensor:
        """The message: 1-D, on the device of `x`; uint8, or a float type where messages can be added up."""

    @abstractmethod
    def decode(self, payload: Tensor, num_elements: int, key: Key) -> Tensor:
        """Decode a message: 1-D fp32. Raises CompressionError if it cannot be such a message."""

    @abstractmethod
    def payload_bytes(self, num_elements: int) -> int | None:
        """The exact size of a message for that many elements; None if it depends on the values."""

    @abstractmethod
    def average(self, x: Tensor, group: dist.ProcessGroup, key: Key) -> Averaged:
        """The mean over the ranks of `group`, by the collective that suits the message; every rank calls it."""

    def contraction(self, num_elements: int) -> float | None:
        """The α in |decode(encode(x)) - x|² ≤ (1 - α)|x|² that holds for every `x`; None if none is guaranteed."""
        return None

    def set_shapes(self, stream: int, shapes: Sequence[Sequence[int]]) -> None:  # noqa: B027 (most codecs ignore shapes)
        """Say which tensors, in order, were flattened one after the other into the `x` of that stream.

        For codecs that look at matrices or layers (`powersgd`, `layerwise`); the same on every rank. The numbers of
        elements must add up to those of `x`. A stream without shapes is taken for one tensor of one dimension.
        """

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart; plain values and tensors. Empty for most."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 (most codecs have nothing to load)
        """Continue from `state_dict()`."""

    def reset(self) -> None:  # noqa: B027 (most codecs have nothing to forget)
        """Forget the state, after a change of membership. Every rank does the same."""


def _mixed(number: int) -> int:
    """A bijection of 32 bits that leaves no pattern (the finaliser of 32-bit hashes by multiply and shift)."""
    number &= 0xFFFFFFFF
    number = ((number ^ number >> 16) * 0x21F0AAAD) & 0xFFFFFFFF
    number = ((number ^ number >> 15) * 0x735A2D97) & 0xFFFFFFFF
    return number ^ number >> 15
