"""N-bit: one to eight bits an element, packed, rounded at random without bias."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from torsh_distributed.compress.codecs.dense.base import DenseCodec
from torsh_distributed.compress.kernels.bits import blocks_packed_bytes
from torsh_distributed.compress.kernels.kernel_choice import kernels_for


class NbitCodec(DenseCodec):
    """Round each block to 2**bits levels between its least and its largest element, up or down at random.

    Why at random: the expected message is the gradient, so errors of many ranks and steps cancel out.
    Payload: middle and step fp32 (blocks, 2), codes (elements) packed as `bits.py` says: 8 ceil(n / 512) + ceil(n bits
    / 8) bytes, and up to 2 more where n is no multiple of 8. Error of an element: below (largest - least) / (2**bits -
    1). A constant block is exact.
    """

    name = "nbit"
    is_unbiased = True
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
