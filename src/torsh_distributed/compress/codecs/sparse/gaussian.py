"""Gaussian: the elements beyond a number of standard deviations, about as many as a normal distribution has there."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from typing_extensions import override

from torsh_distributed.compress.codecs.base import Key
from torsh_distributed.compress.codecs.sparse.base import SparseCodec
from torsh_distributed.compress.codecs.sparse.selection import at_least, largest, share_of
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
