"""Auxiliary losses of a model in pipeline stages: sent with the activations to the stage that computes the loss.

Why not per stage: this way they enter the gradient once, at the scale of the loss, under every schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from torsh_distributed.parallel.expert.layer import moe_layers, staged_auxiliary_loss
from torsh_distributed.parallel.expert.spreading import plain_gradient
from torsh_distributed.parallel.pipeline.runtime import LossFn


class StagedAuxiliaryLoss:
    """Passes the sum of auxiliary losses from stage to stage; the loss gets it as `auxiliary_loss(model)`.

    A microbatch's loss is computed right after its last stage, so the sum that arrived last belongs to it.
    """

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._arrived: Tensor | None = None

    def wrap_stage(self, index: int, stage: nn.Module) -> nn.Module:
        """The stage, with the sum so far as a further input and output."""
        is_last = index == self._num_stages - 1
        return _StageWithAuxiliaryLoss(stage, is_first=index == 0, keep=self._keep if is_last else None)

    def wrap_loss(self, loss_fn: LossFn) -> LossFn:
        """The same loss; while it is computed, `auxiliary_loss(model)` is the sum that arrived."""

        def loss_of(output: Any, targets: Any) -> Tensor:
            assert self._arrived is not None, "the last stage has run"
            arrived = plain_gradient(self._arrived)
            token = staged_auxiliary_loss.set(arrived)
            try:
                loss = loss_fn(output, targets)
            finally:
                staged_auxiliary_loss.reset(token)
            # Stages expect a gradient even if the loss does not use the sum.
            return loss + 0 * arrived

        return loss_of

    def _keep(self, total: Tensor) -> None:
        self._arrived = total


class _StageWithAuxiliaryLoss(nn.Module):
    """A stage that takes the sum of the earlier stages as its last input and returns it as its last output."""

    def __init__(self, stage: nn.Module, *, is_first: bool, keep: Callable[[Tensor], None] | None) -> None:
        super().__init__()
        self.stage = stage
        self._layers = tuple(moe_layers(stage).values())
        self._is_first, self._keep = is_first, keep

    @override
    def forward(self, *inputs: Any) -> Any:
        values = inputs if self._is_first else inputs[:-1]
        out = self.stage(*values)
        mine = [layer.auxiliary_loss for layer in self._layers]
        total = torch.stack(mine).sum(dim=0, keepdim=True) if mine else torch.zeros(1, device=_device(out))
        if not self._is_first:
            total = inputs[-1] + total
        if self._keep is not None:
            self._keep(total.squeeze(0))
            return out
        return (*(out if isinstance(out, tuple) else (out,)), total)


def _device(out: Any) -> torch.device:
    value: Tensor = out[0] if isinstance(out, tuple) else out
    return value.device
