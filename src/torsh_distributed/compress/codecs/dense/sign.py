"""Codecs that send signs: one bit for each element, the sign of the majority, or -1, 0 and 1."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from torsh_distributed.compress.codecs.dense.base import DenseCodec
from torsh_distributed.compress.codecs.dense.quantiser import ROUNDING
from torsh_distributed.compress.kernels.base import TINY
from torsh_distributed.compress.kernels.bits import blocks_packed_bytes, trit_bytes
from torsh_distributed.compress.kernels.kernel_choice import kernels_for
from torsh_distributed.compress.kernels.noise import noise


def make_ternary(threshold: float) -> DenseCodec:
    """The codec that rounds by the threshold, or that draws at random if it is 0."""
    return TernaryCodec(threshold) if threshold > 0 else RandomTernaryCodec()


class TernaryCodec(DenseCodec):
    """Send zero for elements below `threshold` times the largest of their block, a sign for the others.

    The others get their mean magnitude, which gives the least error.
    Payload: scales fp32 (blocks), five trits a byte: 4 ceil(n / 1280) + ceil(n / 5) bytes, 1.63 bits an element.
    """

    name = "ternary"
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

    is_deterministic = False

    def __init__(self, *, server_feedback: bool = False) -> None:
        super().__init__(0.0, server_feedback=server_feedback)

    @override
    def write(self, x: Tensor, out: Tensor, *, seed: int, offset: int = 0) -> None:
        kernels_for(x).ternary_draw(x, self.block, seed, offset, out)

    @override
    def contraction(self, num_elements: int) -> float | None:
        return None


class SignCodec(DenseCodec):
    """Send the sign of each element, and the mean magnitude of each block.

    Why the mean: with it the message is closer to the gradient than zero is, for any gradient (with the root mean
    square it is not), so error feedback converges. Without error feedback training may not: see the guide.
    Payload: means fp32 (blocks), sign bits (elements): 4 ceil(n / 1024) + ceil(n / 8) bytes. Zero counts as positive.
    """

    name = "sign"
    is_deterministic = True
    block = 1024

    @override
    def write(self, x: Tensor, out: Tensor, *, seed: int, offset: int = 0) -> None:
        kernels_for(x).sign_encode(x, self.block, out)

    @override
    def read(self, payload: Tensor, out: Tensor, *, weight: float = 1.0, adds: bool = False) -> bool:
        return kernels_for(out).sign_decode(payload, self.block, out, weight, adds)

    @override
    def payload_bytes(self, num_elements: int) -> int:
        return 4 * -(-num_elements // self.block) + blocks_packed_bytes(num_elements, self.block, 1)

    @override
    def contraction(self, num_elements: int) -> float | None:
        # |x - C(x)|² = |x|² - |x|₁² / n in each block, and |x|₁ ≥ |x|.
        return (1 - ROUNDING) / min(self.block, max(1, num_elements))


class MajorityCodec(SignCodec):
    """As `sign`, but ranks vote: an element gets the sign that most ranks sent, and the mean of their magnitudes.

    Why: one rank with large gradients, or a faulty one, has one vote like all others. Ties are broken at random, the
    same on every rank.
    """

    name = "majority"

    @override
    def combine(self, payloads: Sequence[Tensor], num_elements: int, *, seed: int) -> tuple[Tensor, list[int]]:
        """The elected signs times the mean magnitudes."""
        heads_bytes = 4 * -(-num_elements // self.block)
        device = payloads[0].device
        votes = torch.empty(num_elements, dtype=torch.float32, device=device)
        magnitudes = torch.zeros(heads_bytes // 4, dtype=torch.float32, device=device)
        ballot = torch.empty_like(payloads[0])
        ballot[:heads_bytes].copy_(torch.ones_like(magnitudes).view(torch.uint8))
        damaged = []
        for index, payload in enumerate(payloads):
            heads = payload[:heads_bytes].clone().view(torch.float32)
            if not bool((heads.isfinite() & ~heads.signbit()).all()):
                damaged.append(index)
            magnitudes.add_(heads, alpha=1.0 / len(payloads))
            ballot[heads_bytes:].copy_(payload[heads_bytes:])
            self.read(ballot, votes, adds=index > 0)
        tied = noise(seed, 0, num_elements, device).sign()
        elected = torch.where(votes == 0, tied, votes).sign()
        worth = magnitudes.where(magnitudes >= TINY, 0.0).repeat_interleave(self.block)[:num_elements]
        return elected * worth, damaged
