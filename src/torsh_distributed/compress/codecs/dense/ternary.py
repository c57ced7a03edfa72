"""Ternary: minus, zero or plus for each element."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from torsh_distributed.compress.codecs.dense.base import DenseCodec
from torsh_distributed.compress.codecs.dense.quantiser import ROUNDING
from torsh_distributed.compress.kernels.bits import trit_bytes
from torsh_distributed.compress.kernels.kernel_choice import kernels_for


def make_ternary(threshold: float) -> DenseCodec:
    """The codec that rounds by the threshold, or that draws at random if it is 0."""
    return TernaryCodec(threshold) if threshold > 0 else RandomTernaryCodec()


class TernaryCodec(DenseCodec):
    """Send zero for elements below `threshold` times the largest of their block, a sign for the others.

    The others get their mean magnitude, which gives the least error.
    Payload: scales fp32 (blocks), five trits a byte: 4 ceil(n / 1280) + ceil(n / 5) bytes, 1.63 bits an element.
    """

    name = "ternary"
    is_unbiased = False
    is_deterministic = True
    block = 1280

    def __init__(self, threshold: float = 0.5, *, server_feedback: bool = False) -> None:
        super().__init__(server_feedback=server_feedback)
        self.threshold = threshold
        self.parameter = threshold

    @override
    def write(self, x: Tensor, out: Tensor, *, seed: int, offset: int = 0) -> None:
        kernels_for(x).ternary_encode(x, self.block, self.threshold, out)

    @override
    def read(self, payload: Tensor, out: Tensor, *, weight: float = 1.0, adds: bool = False) -> bool:
        return kernels_for(out).ternary_decode(payload, self.block, out, weight, adds)

    @override
    def payload_bytes(self, num_elements: int) -> int:
        num_full, rest = divmod(num_elements, self.block)
        return 4 * -(-num_elements // self.block) + num_full * trit_bytes(self.block) + trit_bytes(rest)

    @override
    def contraction(self, num_elements: int) -> float | None:
        # With k of n kept, s the sum of their magnitudes in units of the largest and t the threshold, the share of |x|²
        # that arrives is at least s² / k of s + (n - k) t². It is at least 1 / n, because s ≥ 1 and s² ≥ k t².
        return (1 - ROUNDING) / min(self.block, max(1, num_elements))


class RandomTernaryCodec(TernaryCodec):
    """Send a sign with the probability magnitude / largest of the block, else zero: without bias.

    Payload as that of `TernaryCodec`; the scale is the largest magnitude.
    """

    is_unbiased = True
    is_deterministic = False

    def __init__(self, *, server_feedback: bool = False) -> None:
        super().__init__(0.0, server_feedback=server_feedback)

    @override
    def write(self, x: Tensor, out: Tensor, *, seed: int, offset: int = 0) -> None:
        kernels_for(x).ternary_draw(x, self.block, seed, offset, out)

    @override
    def contraction(self, num_elements: int) -> float | None:
        return None
