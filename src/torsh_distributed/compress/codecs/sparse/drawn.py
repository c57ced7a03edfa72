"""DrawnCodec: what codecs that send randomly drawn elements, the same on every rank, have in common."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor
from typing_extensions import override

from torsh_distributed.compress.codecs.base import Key
from torsh_distributed.compress.codecs.linear.base import LinearCodec, require_floats
from torsh_distributed.compress.codecs.sparse.selection import require_share


class DrawnCodec(LinearCodec):
    """Send a `share` of the elements, drawn for each key; the others count as 0.

    On average that share of |x|² arrives, for any `x`; error feedback carries the rest over. No indices travel: every
    rank draws the same. Subclasses choose them in `draw`.
    """

    is_unbiased = False

    def __init__(self, share: float = 0.1) -> None:
        super().__init__(share)
        self.share = require_share(share)
        self._drawn: tuple[tuple[object, ...], Tensor] | None = None

    @abstractmethod
    def draw(self, seed: int, num_elements: int, device: torch.device) -> Tensor:
        """The indices of the elements to send, all different: int64."""

    @override
    def encode(self, x: Tensor, key: Key) -> Tensor:
        return x[self._draw(x.numel(), key, x.device)]

    @override
    def decode(self, payload: Tensor, num_elements: int, key: Key) -> Tensor:
        indices = self._draw(num_elements, key, payload.device)
        require_floats(self, payload, indices.numel())
        return payload.new_zeros(num_elements).index_copy_(0, indices, payload)

    def _draw(self, num_elements: int, key: Key, device: torch.device) -> Tensor:
        """The indices for this key; the last ones are kept, because an average needs them three times."""
        asked = (key.shared, num_elements, device)
        if self._drawn is None or self._drawn[0] != asked:
            self._drawn = asked, self.draw(key.shared, num_elements, device)
        return self._drawn[1]
