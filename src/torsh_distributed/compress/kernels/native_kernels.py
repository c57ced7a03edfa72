"""The compiled kernels on CPU tensors. They release the GIL while they run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from torsh_distributed.compress.kernels.base import NUM_BINS, Histogram, Kernels


class NativeKernels(Kernels):
    """Passes addresses to the compiled module, after checking dtype, device and layout of the tensors."""

    def __init__(self, module: Any) -> None:
        # Any: the module has no Python source; its docstrings give the arguments.
        self._module = module

    @property
    def casts_half(self) -> bool:
        """Whether half precision is faster here than with torch, which has no instructions for it on some machines."""
        return hasattr(self._module, "half_encode")

    def to_half(self, x: Tensor, divisor: float) -> Tensor:
        """x / divisor, rounded to half precision as torch rounds it."""
        out = torch.empty(x.shape, dtype=torch.float16)
        self._module.half_encode(_at(x), x.numel(), divisor, _at(out, torch.float16))
        return out

    def from_half(self, values: Tensor, weight: float) -> Tensor:
        """weight times values, in single precision."""
        out = torch.empty(values.shape, dtype=torch.float32)
        self._module.half_decode(_at(values, torch.float16), values.numel(), _at(out), weight)
        return out

    @override
    def checksum(self, payload: Tensor) -> int:
        return int(self._module.checksum(_at(payload, torch.uint8), payload.numel()))

    @override
    def int8_encode(self, x: Tensor, block: int, out: Tensor) -> None:
        self._module.int8_encode(_at(x), x.numel(), block, _at(out, torch.uint8))

    @override
    def int8_decode(self, payload: Tensor, block: int, out: Tensor, weight: float, adds: bool) -> bool:
        return self._decode(self._module.int8_decode, payload, block, out, weight, adds)

    @override
    def nbit_encode(self, x: Tensor, block: int, bits: int, key: int, offset: int, out: Tensor) -> None:
        low = offset & 0xFFFFFFFF
        self._module.nbit_encode(_at(x), x.numel(), block, bits, key, low, _at(out, torch.uint8))

    @override
    def nbit_decode(self, payload: Tensor, block: int, bits: int, out: Tensor, weight: float, adds: bool) -> bool:
        source = _at(payload, torch.uint8)
        return bool(self._module.nbit_decode(source, out.numel(), block, bits, _at(out), weight, adds))

    @override
    def sign_encode(self, x: Tensor, block: int, out: Tensor) -> None:
        self._module.sign_encode(_at(x), x.numel(), block, _at(out, torch.uint8))

    @override
    def sign_decode(self, payload: Tensor, block: int, out: Tensor, weight: float, adds: bool) -> bool:
        return self._decode(self._module.sign_decode, payload, block, out, weight, adds)

    @override
    def ternary_encode(self, x: Tensor, block: int, threshold: float, out: Tensor) -> None:
        self._module.ternary_encode(_at(x), x.numel(), block, threshold, _at(out, torch.uint8))

    @override
    def ternary_draw(self, x: Tensor, block: int, key: int, offset: int, out: Tensor) -> None:
        self._module.ternary_draw(_at(x), x.numel(), block, key, offset & 0xFFFFFFFF, _at(out, torch.uint8))

    @override
    def ternary_decode(self, payload: Tensor, block: int, out: Tensor, weight: float, adds: bool) -> bool:
        return self._decode(self._module.ternary_decode, payload, block, out, weight, adds)

    @override
    def natural_encode(self, x: Tensor, block: int, key: int, offset: int, out: Tensor) -> None:
        self._module.natural_encode(_at(x), x.numel(), block, key, offset & 0xFFFFFFFF, _at(out, torch.uint8))

    @override
    def natural_decode(self, payload: Tensor, block: int, out: Tensor, weight: float, adds: bool) -> bool:
        return self._decode(self._module.natural_decode, payload, block, out, weight, adds)

    @override
    def histogram(self, x: Tensor) -> Histogram:
        counts, sums = torch.empty(2, NUM_BINS, dtype=torch.int64)
        largest = self._module.histogram(_at(x), x.numel(), _at(counts, torch.int64), _at(sums, torch.int64))
        return Histogram(largest, counts, sums)

    @override
    def codebook_encode(self, x: Tensor, block: int, largest: int, entries: Tensor, bits: int, out: Tensor) -> None:
        source, table = _at(x), _at(entries, torch.uint8)
        self._module.codebook_encode(source, x.numel(), block, largest, table, bits, _at(out, torch.uint8))

    @override
    def codebook_decode(
        self, payload: Tensor, block: int, codebook: Tensor, out: Tensor, weight: float, adds: bool
    ) -> bool:
        source, table = _at(payload, torch.uint8), _at(codebook)
        return bool(
            self._module.codebook_decode(source, out.numel(), block, table, codebook.numel(), _at(out), weight, adds)
        )

    @staticmethod
    def _decode(decoder: Any, payload: Tensor, block: int, out: Tensor, weight: float, adds: bool) -> bool:
        return bool(decoder(_at(payload, torch.uint8), out.numel(), block, _at(out), weight, adds))


def _at(tensor: Tensor, dtype: torch.dtype = torch.float32) -> int:
    """The address of a tensor, after checking that it is what the kernels expect."""
    assert tensor.dtype == dtype
    assert tensor.device.type == "cpu"
    assert tensor.is_contiguous()
    return tensor.data_ptr()
