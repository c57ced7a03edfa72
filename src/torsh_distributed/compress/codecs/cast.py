"""Casts: the gradient in a shorter floating-point type, added up by the backend's own all-reduce."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from torsh_distributed.comm.collectives import all_reduce
from torsh_distributed.compress.codec import Averaged, Key
from torsh_distributed.compress.dense import DenseCodec
from torsh_distributed.events import AlertEvent, emit


class CastCodec(DenseCodec):
    """Send each element as `dtype`. Messages add up as they are, so the volume is that of an all-reduce.

    Elements are divided by the number of ranks before they are cast: the sum then fits where the elements do.
    An element too large for `dtype` becomes infinite, as a loss scaler expects it; each is counted in
    `num_overflows` and told as an alert.
    """

    dtype: ClassVar[torch.dtype]
    is_unbiased = False
    is_deterministic = True

    def __init__(self) -> None:
        super().__init__()
        self.num_overflows = 0
        """Elements of finite gradients that became infinite since this codec was made."""

    @override
    def encode(self, x: Tensor, key: Key) -> Tensor:
        return x.to(self.dtype)

    @override
    def write(self, x: Tensor, out: Tensor, *, seed: int, offset: int = 0) -> None:
        out.view(self.dtype).copy_(x)

    @override
    def read(self, payload: Tensor, out: Tensor, *, weight: float = 1.0, adds: bool = False) -> bool:
        values = payload.view(self.dtype)
        if adds:
            out.add_(values, alpha=weight)
        else:
            torch.mul(values, weight, out=out)
        return True

    @override
    def payload_bytes(self, num_elements: int) -> int:
        return num_elements * self.dtype.itemsize

    @override
    def average(self, x: Tensor, group: dist.ProcessGroup, key: Key) -> Averaged:
        num_ranks = group.size()
        self.require_agreement(x, group)
        message = self.encode(x / num_ranks, key)
        sent = message.float() * num_ranks
        mean = all_reduce(message, group=group).float()
        self._count_overflows(mean, key)
        num_bytes = 2 * (num_ranks - 1) * self.payload_bytes(x.numel()) // num_ranks
        return Averaged(mean, sent, num_bytes)

    def _count_overflows(self, mean: Tensor, key: Key) -> None:
        """`mean` shows the overflow of any rank, and of the sum: every rank counts the same."""
        num_lost = int(mean.numel() - mean.isfinite().sum())
        if num_lost:
            self.num_overflows += num_lost
            emit(
                AlertEvent(
                    severity="warning",
                    name="gradient_overflow",
                    message=f"{num_lost} of {mean.numel()} elements of a gradient do not fit {self.name}"
                    f" (step {key.step}, stream {key.stream}); bf16 has the range of fp32",
                )
            )


class Fp32Codec(CastCodec):
    """No compression: every element as it is, by the backend's all-reduce; what the others are compared with."""

    name = "none"
    dtype = torch.float32
    is_unbiased = True

    @override
    def average(self, x: Tensor, group: dist.ProcessGroup, key: Key) -> Averaged:
        return super().average(x, group, key)._replace(sent=x)


class Fp16Codec(CastCodec):
    """Half precision: 11 significant bits, largest number 65504."""

    name = "fp16"
    dtype = torch.float16


class Bf16Codec(CastCodec):
    """Brain floating point: 8 significant bits, the range of fp32."""

    name = "bf16"
    dtype = torch.bfloat16
