"""Block int8: each element as a byte, relative to the largest magnitude of its block."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from torsh_distributed.compress.codecs.dense.base import DenseCodec
from torsh_distributed.compress.codecs.dense.quantiser import ROUNDING
from torsh_distributed.compress.kernels.kernel_choice import kernels_for


class Int8Codec(DenseCodec):
    """Round each block to 255 levels around zero, to the nearest.

    Why blocks: a bucket mixes layers; an outlier costs precision to its own block only.
    Payload: scales fp32 (blocks), codes int8 (elements): 4 ceil(n / block) + n bytes. Error of an element: at most
    largest / 254. A block whose largest magnitude is below 2**-120 is sent as zeros.
    """

    name = "int8"
    is_unbiased = False
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
