"""Batch norms inside a Pipe whose running means follow batches, not the microbatches that they are cut into."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from torsh_distributed.migrate.fairscale.recomputing import is_recomputing

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class DeferredBatchNorm(nn.Module):
    """Takes over the parameters and buffers of a batch norm. Microbatches are normalised by their own statistics.

    `commit` ends a batch: the running mean and variance then move as those of the batch norm on the whole batch would.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, norm: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) -> None:
        super().__init__()
        self.eps, self.momentum = norm.eps, norm.momentum
        self.weight, self.bias = norm.weight, norm.bias
        for name, buffer in norm.named_buffers():
            self.register_buffer(name, buffer)
        self.train(norm.training)
        self._count = 0
        self._sums: Tensor | None = None
        """The sum over the microbatches so far, and that of the squares."""

    @override
    def forward(self, value: Tensor) -> Tensor:
        if not self.training:
            return functional.batch_norm(
                value, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        if not is_recomputing():
            self._add(value.detach())
        return functional.batch_norm(value, None, None, self.weight, self.bias, True, 0.0, self.eps)

    def _add(self, value: Tensor) -> None:
        rows = value.transpose(0, 1).flatten(1).double()  # the sum of squares cancels in float32
        sums = torch.stack([rows.sum(1), rows.square().sum(1)])
        self._sums = sums if self._sums is None else self._sums + sums
        self._count += rows.shape[1]

    @torch.no_grad()
    def commit(self) -> None:
        """Move the running statistics by the batch whose microbatches have all been seen."""
        if self._sums is None:
            return
        (mean, square), count = self._sums / self._count, self._count
        self._sums, self._count = None, 0
        self.num_batches_tracked += 1
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        variance = (square - mean.square()) * count / max(1, count - 1)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


def defer_batch_norms(module: nn.Module) -> None:
    """Replace the batch norms inside a module that keep running statistics."""
    for name, child in module.named_children():
        if isinstance(child, _NORMS) and child.track_running_stats:
            setattr(module, name, DeferredBatchNorm(child))
        else:
            defer_batch_norms(child)


def commit_batch_norms(module: nn.Module) -> None:
    """At the end of a batch, for every deferred batch norm inside."""
    for one in module.modules():
        if isinstance(one, DeferredBatchNorm):
            one.commit()
