"""Casts: the gradient in a shorter floating-point type, summed by the backend's all-reduce."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.compress.codecs.base import Averaged, Key
from torsh_distributed.compress.codecs.dense.base import DenseCodec
from torsh_distributed.compress.kernels.kernel_choice import compiled_kernels
from torsh_distributed.compress.kernels.native_kernels import NativeKernels
from torsh_distributed.events import AlertEvent, emit


class CastCodec(DenseCodec):
    """Send each element as `dtype`. Messages add up as they are, so the volume is that of an all-reduce.

    Elements are divided by the number of ranks before the cast, so the sum fits if the elements do. An element too
    large for `dtype` becomes infinite, as a loss scaler expects; each is counted in `num_overflows` and reported as an
    alert. Sums are not checked for damage: they are as large as the gradient, and the all-reduce is the one that
    training without compression relies on.
    """

    dtype: ClassVar[torch.dtype]
    is_deterministic = True

    def __init__(self) -> None:
        super().__init__()
        self.num_overflows = 0
        """Elements of finite gradients that became infinite since this codec was made."""

    @override
    def encode(self, x: Tensor, key: Key) -> Tensor:
        return _narrow(x, self.dtype)

    @override
    def write(self, x: Tensor, out: Tensor, *, seed: int, offset: int = 0) -> None:
        message = _narrow(x, self.dtype)
        self._look_for_overflow(message, Key())
        out.view(self.dtype).copy_(message)

    @override
    def read(self, payload: Tensor, out: Tensor, *, weight: float = 1.0, adds: bool = False) -> bool:
        values = _widen(payload.view(self.dtype), weight)
        if adds:
            out.add_(values)
        else:
            out.copy_(values)
        return True

    @override
    def payload_bytes(self, num_elements: int) -> int:
        return num_elements * self.dtype.itemsize

    @override
    def average(self, x: Tensor, group: dist.ProcessGroup, key: Key) -> Averaged:
        num_ranks = group.size()
        self.require_agreement(x, group)
        message = _narrow(x, self.dtype, divisor=num_ranks)
        sent = _widen(message, num_ranks)
        mean = _widen(all_reduce(message, group=group))
        self._look_for_overflow(mean, key)
        return Averaged(mean, sent, self._reduced_bytes(x, num_ranks))

    def _reduced_bytes(self, x: Tensor, num_ranks: int) -> int:
        return 2 * (num_ranks - 1) * self.payload_bytes(x.numel()) // num_ranks

    def _look_for_overflow(self, values: Tensor, key: Key) -> None:
        """Count and report overflows. After an all-reduce all ranks see those of any rank, and of the sum."""
        if values.numel() == 0 or bool(torch.linalg.vector_norm(values, float("inf")).isfinite()):
            return
        num_lost = int(values.numel() - values.isfinite().sum())
        self.num_overflows += num_lost
        emit(
            AlertEvent(
                severity="warning",
                name="gradient_overflow",
                message=f"{num_lost} of {values.numel()} elements of a gradient do not fit {self.name}"
                f" (step {key.step}, stream {key.stream}); bf16 has the range of fp32",
            )
        )


class Fp32Codec(CastCodec):
    """No compression: every element as it is, by the backend's all-reduce; the baseline of the others."""

    name = "none"
    dtype = torch.float32

    @override
    def average(self, x: Tensor, group: dist.ProcessGroup, key: Key) -> Averaged:
        self.require_agreement(x, group)
        mean = all_reduce(x / group.size(), group=group)
        return Averaged(mean, x, self._reduced_bytes(x, group.size()))


class Fp16Codec(CastCodec):
    """Half precision: 11 significant bits, largest number 65504."""

    name = "fp16"
    dtype = torch.float16


class Bf16Codec(CastCodec):
    """Brain floating point: 8 significant bits, the range of fp32."""

    name = "bf16"
    dtype = torch.bfloat16


def _narrow(x: Tensor, dtype: torch.dtype, *, divisor: float = 1.0) -> Tensor:
    """x / divisor as `dtype`."""
    compiled = _half_caster(x) if dtype == torch.float16 else None
    if compiled is not None:
        return compiled.to_half(x, divisor)
    return (x / divisor if divisor != 1 else x).to(dtype)


def _widen(values: Tensor, weight: float = 1.0) -> Tensor:
    """weight times values, in fp32: a product in the short type would be rounded again."""
    compiled = _half_caster(values) if values.dtype == torch.float16 else None
    if compiled is not None:
        return compiled.from_half(values, weight)
    return values.float() * weight if weight != 1 else values.float()


def _half_caster(tensor: Tensor) -> NativeKernels | None:
    kernels = compiled_kernels() if tensor.device.type == "cpu" else None
    return kernels if kernels is not None and kernels.casts_half else None
