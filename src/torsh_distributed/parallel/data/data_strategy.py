"""Data parallelism as a strategy: every rank holds the whole model and works on its part of the batch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypedDict

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Unpack, override

from torsh_distributed.comm.collectives.objects import all_gather_object
from torsh_distributed.comm.shared_memory.buffers import shares_memory
from torsh_distributed.compress.compressor import GradientCompressor
from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument
from torsh_distributed.parallel.data.ddp import Compression, DistributedDataParallel, ReduceDtype
from torsh_distributed.parallel.mesh.mesh_reduction import HeldGradients, clip_to_norm, grad_norm, mean_over
from torsh_distributed.parallel.optim import CpuAdam
from torsh_distributed.parallel.strategy import PendingNumber, Strategy
from torsh_distributed.plan import CompressConfig, DdpConfig, Plan
from torsh_distributed.plan.sections.distributed import DistributedConfig

_log = logging.getLogger(__name__)

_NUM_SHOWN = 3


def has_unused_params(loss: Tensor, params: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> bool:
    """Whether on any rank the graph of `loss` leaves a parameter out; every rank of the group calls this."""
    used = _params_behind(loss)
    mine = [] if used is None else [name for name, param in params.items() if id(param) not in used]
    found = next(filter(None, all_gather_object(mine[: _NUM_SHOWN + 1], group=group)), None)
    if found is not None and dist.get_rank() == 0:
        more = ", …" if len(found) > _NUM_SHOWN else ""
        _log.warning(
            "the loss does not depend on %s%s: gradients are searched for in every step, as by"
            " ddp.find_unused_parameters; freeze what is not trained (requires_grad_(False)) to save that",
            ", ".join(found[:_NUM_SHOWN]),
            more,
        )
    return found is not None


def _params_behind(loss: Tensor) -> set[int] | None:
    """The ids of the parameters in the graph of `loss`; None where a part of it is computed only in backward."""
    found: set[int] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "CheckpointFunction" in node.name():
            return None
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.add(id(variable))
        waiting.extend(before for before, _ in node.next_functions)
    return found


_NUMEL_TO_DIVIDE = 1 << 20
"""From about here on, reading half of the gradients and a sum in shared memory is faster than reading all of them."""


class GradientOptions(TypedDict, total=False):
    """The form in which gradients are sent; by default as they are."""

    compression: Compression
    reduce_dtype: ReduceDtype
    seed: int


def gradient_options(plan: Plan) -> GradientOptions:
    """The format that a plan asks for."""
    return {
        "compression": plan.compress,
        "reduce_dtype": plan.precision.reduce_dtype,
        "seed": plan.training.seed,
    }


class DataParallel(Strategy):
    """Replicas kept equal by averaging gradients in buckets while backward still computes."""

    def __init__(
        self,
        model: nn.Module,
        config: DdpConfig,
        distributed: DistributedConfig | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        divides_update: bool = True,
        **options: Unpack[GradientOptions],
    ) -> None:
        """`divides_update`: ranks of a node may each do a part of the update, in all replicas."""
        self._divides_update = divides_update
        self._keeps_failed = False
        self._has_unused: bool | None = None
        """Whether parameters get no gradient; None before the first backward."""
        self._distributed = distributed
        self._options = options
        self._asked_for_search = config.find_unused_parameters
        self._ddp = DistributedDataParallel(model, config, group=group, distributed=distributed, **options)
        self._group = self._ddp.process_group
        self._device = self._ddp.device
        # Decided by the model, not by the gradients of a step: all ranks must take the same way.
        num_trained = sum(param.numel() for param in self._ddp.parameters() if param.requires_grad)
        self._divides_norm = (
            self._device.type == "cpu" and shares_memory(self._group) and num_trained >= _NUMEL_TO_DIVIDE
        )

    @property
    @override
    def model(self) -> DistributedDataParallel:
        return self._ddp

    @property
    @override
    def follows_freezing(self) -> bool:
        return True

    @property
    @override
    def data_rank(self) -> int:
        return dist.get_rank(self._group)

    @property
    @override
    def data_degree(self) -> int:
        return dist.get_world_size(self._group)

    @property
    @override
    def samples_group(self) -> dist.ProcessGroup:
        return self._group

    @override
    def attach(self, optimizer: Optimizer) -> None:
        if type(optimizer) is CpuAdam and self._divides_update:
            optimizer.divide(self._ddp.averaged_parameters(), self._group)

    def rebuilt(self) -> DataParallel:
        """The same over the world as it is now, after `enter_world`; replicas are equal. Every rank calls this.

        This object is of no use afterwards.
        """
        self._ddp.retire()
        # Those that join have not seen a backward.
        has_unused = any(all_gather_object(self._has_unused is True))
        other = DataParallel(
            self._ddp.module,
            self._ddp.bucket_config.replace(find_unused_parameters=self._asked_for_search),
            self._distributed,
            divides_update=self._divides_update,
            **self._options,
        )
        other._has_unused = has_unused or None
        other._ddp.adopt_hooks(self._ddp)
        if self._keeps_failed:
            other.keep_failed_gradients()
        other._ddp.train(self._ddp.training)  # type: ignore[no-untyped-call]  # untyped in torch
        return other

    def keep_failed_gradients(self) -> None:
        """From now on, let `keep_gradients` find what a rank had when the average failed."""
        self._keeps_failed = True
        self._ddp.keep_failed_gradients()

    @override
    def before_backward(self, loss: Tensor) -> None:
        """Find out in the first backward whether parameters get no gradient, as one process would not mind."""
        if self._has_unused is None:
            settings = self._ddp.bucket_config
            is_known = settings.find_unused_parameters or settings.static_graph or self.data_degree == 1
            self._has_unused = not is_known and has_unused_params(loss, self._ddp.trained, self._group)
        if self._has_unused:
            self._ddp.search_unused(loss)
        self._ddp.expect_average()

    @override
    def after_backward(self, loss: Tensor) -> None:
        """Refuse a step in which this rank left a parameter out that it used before: torch averages nothing behind it,
        and says so only in the next forward."""
        if not self._ddp.lacks_average:
            return
        used = _params_behind(loss)
        unused = [name for name, param in self._ddp.trained.items() if used is not None and id(param) not in used]
        raise InvalidArgument(
            f"the loss does not depend on {', '.join(unused) or 'some parameters'} in this step, as it did before",
            hint="set ddp.find_unused_parameters; no parameter was updated",
            unused=unused,
        )

    @override
    def accumulating(self, *, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext() if is_last else self._ddp.no_sync()

    @override
    def mean_loss(self, loss: Tensor) -> PendingNumber:
        return mean_over(loss, self._group)

    @override
    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        grads = [param.grad for param in self._ddp.parameters() if param.grad is not None]
        norm = grad_norm([self._equal_on_all_ranks(grads)], self._device)
        clip_to_norm(grads, norm, max_norm)
        return norm

    def _equal_on_all_ranks(self, grads: Sequence[Tensor]) -> HeldGradients:
        """Averaged gradients: each rank reads a part, if the sum over the ranks costs less than reading all of them."""
        if not self._divides_norm:
            return HeldGradients(grads)
        num_ranks, rank = self._group.size(), self._group.rank()
        parts = (grad.chunk(num_ranks) if grad.dim() and not grad.is_sparse else (grad,) for grad in grads)
        return HeldGradients([part[rank] for part in parts if rank < len(part)], (self._group,))

    @override
    def take_comm_s(self) -> float | None:
        return self._ddp.take_comm_s()

    @property
    @override
    def compressor(self) -> GradientCompressor | None:
        return self._ddp.compressor

    @override
    def use_buckets(self, config: DdpConfig) -> None:
        if self.compressor is not None:
            raise FeatureNotAvailable(
                "the error that compression carries over belongs to the buckets as they are",
                hint="set the sizes of buckets in the plan before the job starts",
                feature="ddp.max_bucket_size_mb",
            )
        before = self._ddp
        before.retire()
        config = config.replace(find_unused_parameters=before.bucket_config.find_unused_parameters)
        other = DistributedDataParallel(
            before.module, config, group=self._group, distributed=self._distributed, **self._options
        )
        other.adopt_hooks(before)
        if self._keeps_failed:
            other.keep_failed_gradients()
        other.train(before.training)  # type: ignore[no-untyped-call]  # untyped in torch
        self._ddp = other

    @override
    def use_compression(self, config: CompressConfig) -> None:
        self._ddp.with_compression(config)
        self._options["compression"] = config
