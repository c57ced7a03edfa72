"""Auxiliary losses of a model in pipeline stages: they travel with the activations to the stage that has the loss.

Why not each stage on its own: so they reach the gradient once, at the scale the loss has, under every schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from torsh_distributed.parallel.expert.layer import carried_loss, moe_layers
from torsh_distributed.parallel.expert.spreading import plain_gradient

LossFn = Callable[[Any, Any], Tensor]
Wrap = Callable[[int, nn.Module], nn.Module]


class CarriedLoss:
    """Makes stages hand on the sum of auxiliary losses so far, and gives it to the loss as `auxiliary_loss(model)`.

    A microbatch's loss is computed right after its last stage, so the sum that arrived there last is its own.
    """

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._arrived: Tensor | None = None

    def around(self, inner: Wrap | None) -> Wrap:
        """Wraps a stage, within whatever else wraps it."""

        def wrap(index: int, stage: nn.Module) -> nn.Module:
            wrapped = inner(index, stage) if inner else stage
            is_last = index == self._num_stages - 1
            return _Adding(wrapped, is_first=index == 0, keep=self._keep if is_last else None)

        return wrap

    def adding(self, loss_fn: LossFn) -> LossFn:
        """The same loss; while it is computed, the auxiliary losses are those that arrived."""

        def loss_of(output: Any, targets: Any) -> Tensor:
            assert self._arrived is not None, "the last stage ran before"
            arrived = plain_gradient(self._arrived)
            token = carried_loss.set(arrived)
            try:
                loss = loss_fn(output, targets)
            finally:
                carried_loss.reset(token)
            # Stages wait for a gradient, also where the loss leaves the auxiliary ones out.
            return loss + 0 * arrived

        return loss_of

    def _keep(self, total: Tensor) -> None:
        self._arrived = total


class _Adding(nn.Module):
    """A stage that takes the sum of the stages before as its last input, and gives it on as its last output."""

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
        total = torch.stack(mine).sum(dim=0, keepdim=True) if mine else torch.zeros(1, device=values[0].device)
        if not self._is_first:
            total = inputs[-1] + total
        if self._keep is not None:
            self._keep(total.squeeze(0))
            return out
        return (*(out if isinstance(out, tuple) else (out,)), total)
