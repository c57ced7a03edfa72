"""Bernoulli: every element is sent with a fixed probability."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from torsh_distributed.compress.codecs.base import Key
from torsh_distributed.compress.codecs.sparse.drawn import DrawnCodec
from torsh_distributed.compress.codecs.sparse.draws import acceptance, draw_each


class BernoulliCodec(DrawnCodec):
    """Send each element with probability `share`, independently.

    Payload: as many fp32 values as were drawn, share·n on average, and nothing else.
    """

    name = "bernoulli"

    @override
    def draw(self, seed: int, num_elements: int, device: torch.device) -> Tensor:
        return draw_each(seed, num_elements, self.share, device)

    @override
    def payload_bytes(self, num_elements: int) -> int | None:
        return 0 if num_elements == 0 else None


class ScaledBernoulliCodec(BernoulliCodec):
    """Bernoulli with decoded values divided by the probability: unbiased, for training without error feedback.

    Not for error feedback: residuals would be 1/share - 1 times as large as what is sent, and grow.
    """

    is_unbiased = True

    @override
    def decode(self, payload: Tensor, num_elements: int, key: Key) -> Tensor:
        return super().decode(payload, num_elements, key).mul_(2**32 / acceptance(self.share))
