"""A loss over the outputs of all ranks, for losses that compare samples with each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from torsh_distributed.comm.collectives.objects import all_gather_varsize
from torsh_distributed.parallel.torch_internals import tree_flatten, tree_map_only
from torsh_distributed.train.batches import count_samples


class GatheredLoss:
    """Calls a loss_fn with the outputs and targets of every rank, in the order of the batch; equal on all ranks.

    Gradients flow to this rank's own outputs, multiplied by the number of ranks: averaging divides by it.
    """

    def __init__(
        self,
        loss_fn: Callable[[Any, Any], Any],
        group: Callable[[], dist.ProcessGroup | None],
        is_borrowed: Callable[[], bool],
    ) -> None:
        self._loss_fn, self._group, self._is_borrowed = loss_fn, group, is_borrowed

    def __call__(self, outputs: Any, targets: Any) -> Any:
        """The loss of the batch of all ranks."""
        group = self._group()
        if group is None or group.size() == 1:
            return self._loss_fn(outputs, targets)
        rows = count_samples(targets)
        own = 0 if self._is_borrowed() else rows

        def gathered(tensor: Tensor) -> Tensor:
            if not tensor.dim() or tensor.shape[0] != rows:
                return tensor
            out: Tensor = _Gather.apply(tensor[:own], group)  # type: ignore[no-untyped-call]  # untyped in torch
            return out

        loss = self._loss_fn(tree_map_only(Tensor, gathered, outputs), tree_map_only(Tensor, gathered, targets))
        if own or not isinstance(loss, Tensor):
            return loss
        # Backward must reach the parameters of every rank: others wait for their gradients.
        mine = [one for one in tree_flatten(outputs)[0] if isinstance(one, Tensor) and one.requires_grad]
        return loss + sum(0.0 * one.sum() for one in mine)


class _Gather(torch.autograd.Function):
    """The rows of all ranks, by rank; backward keeps this rank's."""

    @staticmethod
    @override
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        parts = all_gather_varsize(rows, group=group)
        start = sum(len(part) for part in parts[: group.rank()])
        ctx.place, ctx.size = (start, start + len(rows)), group.size()
        return torch.cat(parts)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> Any:
        start, stop = ctx.place
        return grads[0][start:stop] * ctx.size, None
