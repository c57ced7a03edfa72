"""TopK: the largest elements of a gradient."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from torsh_distributed.compress.codecs.base import Key
from torsh_distributed.compress.codecs.sparse.base import SparseCodec
from torsh_distributed.compress.codecs.sparse.selection import largest, require_share, share_of
from torsh_distributed.compress.messages.sparse import sparse_bytes


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
