"""BatchNorm with the statistics of all ranks' samples, as one process would have them (`training.sync_batch_norm`).

torch's SyncBatchNorm works on GPUs only; this one works on any device, on uneven shares of a batch, and on ranks that
compute with another's sample because they have none of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.parallel.compiling import outside_graphs
from torsh_distributed.parallel.torch_internals import _BatchNorm


class BatchStatistics:
    """Whose samples the statistics are over; set once the strategy is known."""

    def __init__(self) -> None:
        self.group: Callable[[], dist.ProcessGroup | None] = lambda: None
        self.is_borrowed: Callable[[], bool] = lambda: False
        """Whether this rank's samples are another's and do not count."""

    def __deepcopy__(self, memo: Any) -> BatchStatistics:
        return self


def batch_norms(model: nn.Module) -> list[str]:
    """The names of layers that normalise by statistics of the batch, as the model is now."""
    return [name for name, module in model.named_modules() if isinstance(module, _BatchNorm) and module.training]


def sync_batch_norms(model: nn.Module) -> BatchStatistics:
    """Let every BatchNorm of the model use the statistics of all ranks, in place; parameters and names stay."""
    shared = BatchStatistics()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.forward = _SyncedForward(module, shared)  # type: ignore[method-assign, assignment]  # names and hooks stay
    return shared


class _SyncedForward:
    def __init__(self, norm: _BatchNorm, shared: BatchStatistics) -> None:
        self._norm, self._shared = norm, shared

    def __call__(self, inputs: Tensor) -> Tensor:
        norm, group = self._norm, self._shared.group()
        uses_batch = norm.training or (norm.running_mean is None and norm.running_var is None)
        if group is None or group.size() == 1 or not uses_batch:
            return type(norm).forward(norm, inputs)
        norm._check_input_dim(inputs)  # type: ignore[no-untyped-call]  # untyped in torch
        return _normalized(norm, inputs, group, self._shared.is_borrowed())


@outside_graphs
def _normalized(norm: _BatchNorm, inputs: Tensor, group: dist.ProcessGroup, is_borrowed: bool) -> Tensor:
    values = inputs.float() if inputs.dtype in (torch.float16, torch.bfloat16) else inputs
    axes = [axis for axis in range(values.dim()) if axis != 1]
    shape = [-1 if axis == 1 else 1 for axis in range(values.dim())]
    share = 0.0 if is_borrowed else 1.0
    count = values.new_tensor([share * values.numel() / values.shape[1]])
    sums = _summed(torch.cat([share * values.sum(axes), count]), group)
    total = sums[-1].detach()
    mean = sums[:-1] / total
    centered = values - mean.view(shape)
    # In two passes: the difference of two large numbers would lose the digits that one process has.
    variance = _summed(share * centered.square().sum(axes), group) / total
    _update_running(norm, mean.detach(), variance.detach(), total)
    out = centered * torch.rsqrt(variance + norm.eps).view(shape)
    if norm.affine:
        out = out * norm.weight.view(shape) + norm.bias.view(shape)
    return out.to(inputs.dtype)


@torch.no_grad()
def _update_running(norm: _BatchNorm, mean: Tensor, variance: Tensor, total: Tensor) -> None:
    if not norm.training or norm.running_mean is None or norm.running_var is None:
        return
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    factor = 1.0 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), factor)
    norm.running_var.lerp_((variance * total / (total - 1)).to(norm.running_var.dtype), factor)


def _summed(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    out: Tensor = _Sum.apply(values, group)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


class _Sum(torch.autograd.Function):
    """The sum over ranks; each rank's loss depends on it, so gradients are summed too."""

    @staticmethod
    @override
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_reduce(values.clone(), group=group)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return all_reduce(grads[0].contiguous().clone(), group=ctx.group), None
