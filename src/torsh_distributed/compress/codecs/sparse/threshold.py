"""Threshold: the elements of at least a given magnitude."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from torsh_distributed.compress.codecs.base import Key
from torsh_distributed.compress.codecs.sparse.base import SparseCodec
from torsh_distributed.compress.codecs.sparse.selection import at_least
from torsh_distributed.errors import InvalidArgument


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
