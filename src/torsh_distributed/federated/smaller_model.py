"""Clients that train a smaller model than the server's: pruned by magnitude, rounded to a grid, or both.

    pruning       y <- y . mask      mask: 0 for the smallest |x| of each weight matrix, x the model of the round
    quantisation  forward and backward at q(y), the optimizer's step at y (a straight-through estimate)

The server's model stays whole: where a client's was pruned its update is zero, and what was rounded counts unrounded.
Weights are the parameters of two or more dimensions; others stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from torsh_distributed.errors import ConfigurationError

_FEWEST_BITS, _MOST_BITS = 2, 16


@dataclass(frozen=True, kw_only=True, slots=True)
class SmallerModel:
    """What clients train in place of the whole model."""

    sparsity: float = 0.0
    """The share of each weight matrix that is zero while a client trains."""

    bits: int | None = None
    """Weights have at most 2**bits - 1 values each while a client computes; None: all of them."""

    def __post_init__(self) -> None:
        if not 0 <= self.sparsity < 1:
            raise ConfigurationError("sparsity must be at least 0 and below 1", sparsity=self.sparsity)
        if self.bits is not None and not _FEWEST_BITS <= self.bits <= _MOST_BITS:
            raise ConfigurationError(f"bits must be from {_FEWEST_BITS} to {_MOST_BITS}", bits=self.bits)
        if not self.sparsity and self.bits is None:
            raise ConfigurationError("a smaller model has a sparsity, bits or both", hint="SmallerModel(sparsity=0.5)")

    def masks(self, weights: list[Tensor]) -> list[Tensor]:
        """1 where a weight is kept, 0 where it is one of the smallest of its matrix."""
        return [_mask(weight, int(self.sparsity * weight.numel())) for weight in weights]

    def rounded(self, weight: Tensor) -> Tensor:
        """The weight on its grid."""
        if self.bits is None:
            return weight
        scale = weight.abs().amax() / (2 ** (self.bits - 1) - 1)
        return (weight / scale).round() * scale if scale > 0 else weight


def _mask(weight: Tensor, num_zeros: int) -> Tensor:
    mask = torch.ones_like(weight).flatten()
    # By position where magnitudes are equal: exactly so many are zero.
    mask[weight.abs().flatten().argsort(stable=True)[:num_zeros]] = 0
    return mask.view(weight.shape)


@dataclass(slots=True)
class ShrunkWeights:
    """A model's weights while one client trains it: whole for the optimizer's step, smaller in between."""

    settings: SmallerModel
    _weights: list[Tensor] = field(default_factory=list)
    _masks: list[Tensor] = field(default_factory=list)
    _whole: list[Tensor] = field(default_factory=list)

    @torch.no_grad()
    def begin(self, model: nn.Module) -> None:
        """The model has the round's values."""
        self._weights = [param for param in model.parameters() if param.dim() > 1]
        self._masks = self.settings.masks(self._weights)
        self.shrink()

    @torch.no_grad()
    def shrink(self) -> None:
        """Behind a step, and at first."""
        self._whole = [weight * mask for weight, mask in zip(self._weights, self._masks, strict=True)]
        for weight, whole in zip(self._weights, self._whole, strict=True):
            weight.copy_(self.settings.rounded(whole))

    @torch.no_grad()
    def restore(self) -> None:
        """Before a step, and at the end: weights as they are without rounding, and gradients where they are kept."""
        for weight, whole, mask in zip(self._weights, self._whole, self._masks, strict=True):
            weight.copy_(whole)
            if weight.grad is not None:
                weight.grad.mul_(mask)

    @torch.no_grad()
    def unprune(self, start: dict[int, Tensor]) -> None:
        """At the end: pruned weights get the round's values, so their update is zero."""
        for weight, mask in zip(self._weights, self._masks, strict=True):
            weight.copy_(torch.where(mask > 0, weight, start[id(weight)]))
