"""Codecs that send the largest elements: a share of them, those above a threshold, or above an estimated one."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from typing_extensions import override

from torsh_distributed.compress.codecs.base import Key
from torsh_distributed.compress.codecs.sparse.base import SparseCodec
from torsh_distributed.compress.codecs.sparse.selection import at_least, largest, require_share, share_of
from torsh_distributed.compress.messages.sparse import sparse_bytes
from torsh_distributed.errors import InvalidArgument

_SLACK = 1.5


class GaussianCodec(SparseCodec):
    """Send the elements beyond `deviations` standard deviations from 0: for 2.0, 4.55 % of a normal gradient.

    Gradients have heavier tails than a normal distribution: the few largest elements dominate the standard deviation,
    and too few others reach it. If the count is off by more than half, exactly as many are sent as a normal
    distribution has beyond it. Payload: 8 + k·2 + index bytes, for k elements sent.
    """

    name = "gaussian"

    def __init__(self, deviations: float = 2.0, *, dtype: torch.dtype = torch.float16) -> None:
        super().__init__(deviations, dtype=dtype)
        if not 0 <= deviations <= 10:
            raise InvalidArgument("deviations must be from 0 to 10", deviations=deviations)
        self.deviations = deviations

    @property
    def share(self) -> float:
        """The share of a normal distribution that lies beyond."""
        return math.erfc(self.deviations / math.sqrt(2))

    @override
    def select(self, x: Tensor, key: Key) -> Tensor:
        wanted = share_of(self.share, x.numel())
        # The norm relative to the largest element: squares of very small or large gradients leave the range of fp32.
        peak = float(x.abs().amax()) if x.numel() else 0.0
        if peak > 0:
            deviation = peak * float((x / peak).norm()) / math.sqrt(x.numel())
            found = at_least(x, self.deviations * deviation)
            if wanted / _SLACK <= found.numel() <= wanted * _SLACK:
                return found
        return largest(x, wanted)

    @override
    def payload_bytes(self, num_elements: int) -> int | None:
        return 8 if num_elements == 0 else None

    @override
    def contraction(self, num_elements: int) -> float | None:
        if num_elements == 0:
            return None
        # The largest elements are kept, at least two thirds of those wanted; rounding loses less than 2**-20 of them.
        fewest = math.ceil(share_of(self.share, num_elements) / _SLACK)
        return fewest / num_elements * (1 - 2**-20)


class TopKCodec(SparseCodec):
    """Send the `share` of elements of largest magnitude, with their signs; of equal magnitudes the first.

    What is not sent is a large part of every gradient: without error feedback training may diverge.
    Payload: 8 + k·2 + index bytes, for k = max(1, round(share·n)); 24.6 bits for each sent element at 1 %.
    """

    name = "topk"

    def __init__(self, share: float = 0.1, *, dtype: torch.dtype = torch.float16) -> None:
        super().__init__(share, dtype=dtype)
        self.share = require_share(share)

    @override
    def select(self, x: Tensor, key: Key) -> Tensor:
        return largest(x, share_of(self.share, x.numel()))

    @override
    def payload_bytes(self, num_elements: int) -> int:
        return sparse_bytes(num_elements, share_of(self.share, num_elements), self.dtype)

    @override
    def contraction(self, num_elements: int) -> float | None:
        if num_elements == 0:
            return None
        # The kept elements hold at least their share of the energy; rounding to fp16 loses less than 2**-20 of that.
        return share_of(self.share, num_elements) / num_elements * (1 - 2**-20)


class ThresholdCodec(SparseCodec):
    """Send the elements whose magnitude reaches `threshold`: all of them, a few, or none.

    No element that is left out reaches the threshold, so residuals stay below it; the gradient decides how much is
    sent. Payload: 8 + k·2 + index bytes, for k elements sent.
    """

    name = "threshold"

    def __init__(self, threshold: float = 0.01, *, dtype: torch.dtype = torch.float16) -> None:
        super().__init__(threshold, dtype=dtype)
        if not 0 <= threshold <= 1e30:
            raise InvalidArgument("a threshold must be a magnitude from 0 to 1e30", threshold=threshold)
        self.threshold = threshold

    @override
    def select(self, x: Tensor, key: Key) -> Tensor:
        return at_least(x, self.threshold)

    @override
    def payload_bytes(self, num_elements: int) -> int | None:
        return 8 if num_elements == 0 else None
