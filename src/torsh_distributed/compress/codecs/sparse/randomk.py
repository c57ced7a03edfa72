"""RandomK: a fixed number of elements, drawn at random."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from torsh_distributed.compress.codecs.base import Key
from torsh_distributed.compress.codecs.sparse.drawn import DrawnCodec
from torsh_distributed.compress.codecs.sparse.draws import draw_without_replacement
from torsh_distributed.compress.codecs.sparse.selection import share_of


class RandomKCodec(DrawnCodec):
    """Send k = max(1, round(share·n)) elements, drawn without replacement.

    Payload: k fp32 values, and nothing else.
    """

    name = "randomk"

    @override
    def draw(self, seed: int, num_elements: int, device: torch.device) -> Tensor:
        return draw_without_replacement(seed, num_elements, share_of(self.share, num_elements), device)

    @override
    def payload_bytes(self, num_elements: int) -> int:
        return 4 * share_of(self.share, num_elements)


class ScaledRandomKCodec(RandomKCodec):
    """RandomK with decoded values multiplied by n/k: unbiased, for training without error feedback.

    Not for error feedback: residuals would be n/k - 1 times as large as what is sent, and grow.
    """

    is_unbiased = True

    @override
    def decode(self, payload: Tensor, num_elements: int, key: Key) -> Tensor:
        return super().decode(payload, num_elements, key).mul_(num_elements / max(1, payload.numel()))
