"""Natural compression: each element becomes one of the two powers of two around it."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from torsh_distributed.compress.codecs.dense.base import DenseCodec
from torsh_distributed.compress.kernels.kernel_choice import kernels_for


class NaturalCodec(DenseCodec):
    """Send sign and exponent; the exponent is rounded up with the probability that keeps the mean.

    Why: the error is relative to each element, so small ones are as precise as large ones, and the second moment grows
    by at most 9/8. It is cheap: random bits are added to the mantissa, and the carry rounds the exponent.
    Payload: largest exponents, a byte (blocks), sign and exponent below the largest, a byte (elements): ceil(n / 1024)
    + n bytes. What is 2**126 times smaller than the largest of its block becomes 0. Magnitudes from 2**127 on are
    rounded down, because there is no power of two above.
    """

    name = "natural"
    is_unbiased = True
    is_deterministic = False
    block = 1024

    @override
    def write(self, x: Tensor, out: Tensor, *, seed: int, offset: int = 0) -> None:
        kernels_for(x).natural_encode(x, self.block, seed, offset, out)

    @override
    def read(self, payload: Tensor, out: Tensor, *, weight: float = 1.0, adds: bool = False) -> bool:
        return kernels_for(out).natural_decode(payload, self.block, out, weight, adds)

    @override
    def payload_bytes(self, num_elements: int) -> int:
        return -(-num_elements // self.block) + num_elements
