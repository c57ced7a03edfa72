"""Wraps any optimizer so it averages gradients over the ranks before it steps; the model stays unwrapped."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from torsh_distributed.comm.collectives.call import resolve_group
from torsh_distributed.comm.collectives.moves import all_gather, broadcast
from torsh_distributed.comm.collectives.packed import plan_buckets
from torsh_distributed.comm.collectives.reductions import all_reduce, reduce_scatter_single
from torsh_distributed.errors import InvalidArgument

Sync = Literal["all_reduce", "all_gather", "reduce_scatter"]
Finish = Callable[[], Tensor]
"""Waits for the average of a bucket and returns it."""


@dataclass
class _GradientBucket:
    """Gradients that are sent together, copied into one buffer when all of them are computed."""

    params: list[Tensor]
    missing: int = 0
    finish: Finish | None = field(default=None)

    def flat(self) -> Tensor:
        """All gradients in one buffer; zeros for those that backward did not compute."""
        return torch.cat(
            [(torch.zeros_like(param) if param.grad is None else param.grad).reshape(-1) for param in self.params]
        )

    def take(self, average: Tensor) -> None:
        start = 0
        for param in self.params:
            piece = average[start : start + param.numel()].view_as(param)
            start += param.numel()
            if param.grad is None:
                param.grad = piece.clone()
            else:
                param.grad.copy_(piece)


class DistributedOptimizer:
    """Averages gradients in buckets while backward still computes, then steps the optimizer.

    `sync` is how a bucket is averaged: `all_reduce`; `all_gather`, where each rank adds all contributions in rank
    order, so every backend gives the same bits; `reduce_scatter`, where each rank averages one part and all parts are
    gathered. All ranks hold the same parameters, in the same order; those of rank 0 are copied to all at the start.
    Buckets start in the same order on every rank, whatever the order of backward. Inside `no_sync()` gradients only
    accumulate.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        sync: Sync = "all_reduce",
        bucket_mb: float = 25.0,
        overlap: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if sync not in _AVERAGES:
            raise InvalidArgument("sync must be all_reduce, all_gather or reduce_scatter", sync=sync)
        if bucket_mb <= 0:
            raise InvalidArgument("bucket_mb must be above 0", bucket_mb=bucket_mb)
        self.optimizer = optimizer
        self._group = resolve_group(group)
        self._average = _AVERAGES[sync]
        self._is_syncing = True
        params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
        for param in params:
            broadcast(param.detach(), dist.get_global_rank(self._group, 0), group=self._group)
        # Backward makes the gradients of the last parameters first.
        params.reverse()
        kinds = [(param.dtype, param.device) for param in params]
        packs = plan_buckets([param.nbytes for param in params], kinds, bucket_bytes=max(1, int(bucket_mb * 2**20)))
        self._buckets = [_GradientBucket([params[index] for index in pack]) for pack in packs]
        self._averaged = {id(param) for param in params}
        self._num_started = 0
        self._begin()
        if overlap:
            for bucket in self._buckets:
                for param in bucket.params:
                    hook = functools.partial(self._arrived, bucket)
                    param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # untyped in torch

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the wrapped optimizer, so schedulers can change them."""
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around backward of all but the last microbatch: gradients accumulate on each rank and are not averaged."""
        self._is_syncing = False
        try:
            yield
        finally:
            self._is_syncing = True

    def synchronize(self) -> None:
        """Make `param.grad` the average over the ranks; `step` does it too, once. For clipping before the step."""
        held = (param for group in self.param_groups for param in group["params"] if param.grad is not None)
        late = [tuple(param.shape) for param in held if id(param) not in self._averaged]
        if late:
            raise InvalidArgument(
                f"a parameter of shape {late[0]} was unfrozen or added after the optimizer was wrapped, so its gradient"
                " is this rank's own",
                hint="make a new DistributedOptimizer around the same optimizer after the change",
                shapes=late,
            )
        for bucket in self._buckets[self._num_started :]:
            self._start(bucket)
        for bucket in self._buckets:
            if bucket.finish is not None:
                bucket.take(bucket.finish())
                bucket.finish = None

    def step(self) -> None:
        """Average what is not averaged yet, then update the parameters; every rank of the group calls this."""
        self.synchronize()
        self._begin()
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """The state of the wrapped optimizer; equal on every rank."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state_dict()`."""
        self.optimizer.load_state_dict(dict(state))

    def _begin(self) -> None:
        self._num_started = 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.params)

    def _arrived(self, bucket: _GradientBucket, _: Tensor) -> None:
        """A gradient is computed: start every bucket that is complete, in order, up to the first that is not."""
        if not self._is_syncing:
            return
        if bucket.missing == 0:
            raise InvalidArgument(
                "a second backward() before step(): its gradients would not be averaged",
                hint="put all but the last backward() of an update into `with optimizer.no_sync():`",
            )
        bucket.missing -= 1
        while self._num_started < len(self._buckets) and self._buckets[self._num_started].missing == 0:
            self._start(self._buckets[self._num_started])

    def _start(self, bucket: _GradientBucket) -> None:
        bucket.finish = self._average(bucket.flat(), self._group)
        self._num_started += 1


def _by_all_reduce(flat: Tensor, group: dist.ProcessGroup) -> Finish:
    work = all_reduce(flat.div_(group.size()), group=group, async_op=True)
    return work.wait


def _by_all_gather(flat: Tensor, group: dist.ProcessGroup) -> Finish:
    work = all_gather(flat, group=group, async_op=True)
    return lambda: torch.stack(work.wait()).sum(dim=0).div_(group.size())


def _by_reduce_scatter(flat: Tensor, group: dist.ProcessGroup) -> Finish:
    size = group.size()
    padded = torch.nn.functional.pad(flat.div_(size), (0, -flat.numel() % size))
    work = reduce_scatter_single(padded, group=group, async_op=True)
    return lambda: torch.cat(all_gather(work.wait(), group=group))[: flat.numel()]


_AVERAGES: dict[str, Callable[[Tensor, dist.ProcessGroup], Finish]] = {
    "all_reduce": _by_all_reduce,
    "all_gather": _by_all_gather,
    "reduce_scatter": _by_reduce_scatter,
}
