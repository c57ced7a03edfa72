"""LinearCodec: what codecs with messages that add up have in common: one all-reduce, whose volume no world changes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from torsh_distributed.compress.codecs.base import Averaged, Codec, Key
from torsh_distributed.compress.exchange.checked_sum import CheckedSums
from torsh_distributed.compress.exchange.message_agreement import AgreementCache, signature_of
from torsh_distributed.errors import CompressionError


def all_reduce_bytes(size_bytes: int, num_ranks: int) -> int:
    """What a rank sends in an all-reduce of that many bytes: the least possible, and what a ring sends."""
    return 2 * (num_ranks - 1) * size_bytes // num_ranks


class LinearCodec(Codec):
    """Messages are fp32 and linear in `x`: the sum of the ranks' messages is the message of the sum.

    Choices such as which elements travel are drawn from `key.shared`, the same on all ranks; they are not sent.
    `parameter` is the number of the method: it must be the same on all ranks. Sums are checked for damage, within
    limits that `checked_sum` states.
    """

    is_deterministic = False

    def __init__(self, parameter: float) -> None:
        self._signature = signature_of(self.name, float(parameter))
        self._agreements = AgreementCache()

    def require_agreement(self, x: Tensor, group: dist.ProcessGroup) -> None:
        """Raise CompressionError on every rank if ranks differ in codec, parameter or size."""
        self._agreements.require(self.name, self._signature, x.numel(), group=group, device=x.device)

    @override
    def reset(self) -> None:
        self._agreements.forget()

    @override
    def average(self, x: Tensor, group: dist.ProcessGroup, key: Key) -> Averaged:
        self.require_agreement(x, group)
        num_ranks = group.size()
        message = self.encode(x, key)
        sent = self.decode(message, x.numel(), key)
        sums = CheckedSums(self.name, group)
        sums.all_reduce(message).div_(num_ranks)
        num_bytes = all_reduce_bytes(message.numel() * message.element_size(), num_ranks)
        sums.raise_together(x.device)
        return Averaged(self.decode(message, x.numel(), key), sent, num_bytes)


def require_floats(codec: Codec, payload: Tensor, count: int) -> None:
    """Raise CompressionError unless the payload is `count` fp32 values."""
    if payload.dtype != torch.float32 or payload.shape != (count,):
        raise CompressionError(
            f"a {codec.name} message of this gradient is {count} fp32 values",
            shape=tuple(payload.shape),
            dtype=payload.dtype,
        )
