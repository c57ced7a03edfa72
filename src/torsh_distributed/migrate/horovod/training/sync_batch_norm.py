"""`SyncBatchNorm`: batch norm over the batches of all ranks, on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.migrate.horovod.collectives.async_calls import allreduce_async
from torsh_distributed.migrate.horovod.collectives.operation_submission import synchronize
from torsh_distributed.migrate.horovod.collectives.reduction_names import Sum
from torsh_distributed.migrate.horovod.world_state import world
from torsh_distributed.parallel.torch_internals import _BatchNorm


class SyncBatchNorm(_BatchNorm):
    """Batch norm whose mean and variance are those of all ranks' batches together; their sizes may differ."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    @override
    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise InvalidArgument("expected at least 2D input", got=f"{input.dim()}D")

    @override
    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training or world().size == 1:
            return super().forward(input)
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        normalized, mean, variance, count = _Normalize.apply(input, self.eps)  # type: ignore[no-untyped-call]  # untyped in torch
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            momentum = self.momentum
            if momentum is None:
                assert self.num_batches_tracked is not None, "tracked together with the running mean"
                momentum = 1.0 / float(self.num_batches_tracked)
            with torch.no_grad():
                unbiased = variance * (count / (count - 1).clamp(min=1))
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
        if self.affine:
            shape = [1, -1] + [1] * (input.dim() - 2)
            normalized = normalized * self.weight.view(shape) + self.bias.view(shape)
        return torch.as_tensor(normalized)


class _Normalize(torch.autograd.Function):
    """Subtract the mean and divide by the deviation of all ranks' batches."""

    @staticmethod
    @override
    def forward(ctx: Any, batch: Tensor, eps: float) -> Any:
        dims = [dim for dim in range(batch.dim()) if dim != 1]
        wide = batch.float() if batch.dtype in (torch.float16, torch.bfloat16) else batch
        count = wide.new_tensor([wide.numel() / wide.shape[1]])
        sums = torch.cat([wide.sum(dims), count])
        totals = synchronize(allreduce_async(sums.contiguous(), op=Sum))
        channels = wide.shape[1]
        num = totals[-1]
        mean = totals[:channels] / num
        # Of differences from the common mean: the difference of two large squares would lose digits.
        shape = [1, -1] + [1] * (batch.dim() - 2)
        centred = wide - mean.view(shape)
        variance = synchronize(allreduce_async((centred * centred).sum(dims).contiguous(), op=Sum)) / num
        inverse = (variance + eps).rsqrt()
        normalized = centred * inverse.view(shape)
        ctx.save_for_backward(normalized, inverse, num)
        ctx.dims, ctx.shape = dims, shape
        ctx.mark_non_differentiable(mean, variance, num)
        return normalized.to(batch.dtype), mean, variance, num

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> Any:
        normalized, inverse, num = ctx.saved_tensors
        grad = grads[0].to(normalized.dtype)
        sums = torch.cat([grad.sum(ctx.dims), (grad * normalized).sum(ctx.dims)])
        totals = synchronize(allreduce_async(sums.contiguous(), op=Sum)) / num
        mean, projection = totals.chunk(2)
        shape = ctx.shape
        result = (grad - mean.view(shape) - normalized * projection.view(shape)) * inverse.view(shape)
        return result.to(grads[0].dtype), None
