"""Codecs that round every element: to n bits or 8 bits of its block's scale, or to a power of two."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from torsh_distributed.compress.codecs.dense.base import DenseCodec
from torsh_distributed.compress.codecs.dense.quantiser import ROUNDING
from torsh_distributed.compress.kernels.bits import blocks_packed_bytes
from torsh_distributed.compress.kernels.kernel_choice import kernels_for


class Int8Codec(DenseCodec):
    """Round each block to 255 levels around zero, to the nearest.

    Why blocks: a bucket mixes layers; an outlier costs precision to its own block only.
    Payload: scales fp32 (blocks), codes int8 (elements): 4 ceil(n / block) + n bytes. Error of an element: at most
    largest / 254. A block whose largest magnitude is below 2**-120 is sent as zeros.
    """

    name = "int8"
    is_deterministic = True

    def __init__(self, block: int = 256, *, server_feedback: bool = False) -> None:
        super().__init__(server_feedback=server_feedback)
        self.block = block

    @override
    def write(self, x: Tensor, out: Tensor, *, seed: int, offset: int = 0) -> None:
        kernels_for(x).int8_encode(x, self.block, out)

    @override
    def read(self, payload: Tensor, out: Tensor, *, weight: float = 1.0, adds: bool = False) -> bool:
        return kernels_for(out).int8_decode(payload, self.block, out, weight, adds)

    @override
    def payload_bytes(self, num_elements: int) -> int:
        return 4 * -(-num_elements // self.block) + num_elements

    @override
    def contraction(self, num_elements: int) -> float | None:
        # The largest of a block is exact; of another, the error is below itself and below largest / 254. With
        # c = (block - 1) / 254**2 that is min(rest, c largest²) of largest² + rest, at most c / (1 + c).
        others = min(self.block, max(1, num_elements)) - 1
        return 1 / (1 + others / 254**2) - ROUNDING


class NaturalCodec(DenseCodec):
    """Send sign and exponent; the exponent is rounded up with the probability that keeps the mean.

    Why: the error is relative to each element, so small ones are as precise as large ones, and the second moment grows
    by at most 9/8. It is cheap: random bits are added to the mantissa, and the carry rounds the exponent.
    Payload: largest exponents, a byte (blocks), sign and exponent below the largest, a byte (elements): ceil(n / 1024)
    + n bytes. What is 2**126 times smaller than the largest of its block becomes 0. Magnitudes from 2**127 on are
    rounded down, because there is no power of two above.
    """

    name = "natural"
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


class NbitCodec(DenseCodec):
    """Round each block to 2**bits levels between its least and its largest element, up or down at random.

    Why at random: the expected message is the gradient, so errors of many ranks and steps cancel out.
    Payload: middle and step fp32 (blocks, 2), codes (elements) packed as `bits.py` says: 8 ceil(n / 512) + ceil(n bits
    / 8) bytes, and up to 2 more where n is not a multiple of 8. Error of an element: below
    (largest - least) / (2**bits - 1). A constant block is exact.
    """

    name = "nbit"
    is_deterministic = False
    block = 512

    def __init__(self, bits: int = 8, *, server_feedback: bool = False) -> None:
        super().__init__(server_feedback=server_feedback)
        self.bits = bits
        self.parameter = bits

    @override
    def write(self, x: Tensor, out: Tensor, *, seed: int, offset: int = 0) -> None:
        kernels_for(x).nbit_encode(x, self.block, self.bits, seed, offset, out)

    @override
    def read(self, payload: Tensor, out: Tensor, *, weight: float = 1.0, adds: bool = False) -> bool:
        return kernels_for(out).nbit_decode(payload, self.block, self.bits, out, weight, adds)

    @override
    def payload_bytes(self, num_elements: int) -> int:
        return 8 * -(-num_elements // self.block) + blocks_packed_bytes(num_elements, self.block, self.bits)
