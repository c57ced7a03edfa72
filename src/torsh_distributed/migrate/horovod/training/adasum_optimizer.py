"""Adasum: each rank takes its own step, and the steps are folded with Adasum."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.migrate.horovod.collectives.async_calls import allreduce_async
from torsh_distributed.migrate.horovod.collectives.horovod_compression import Compressor
from torsh_distributed.migrate.horovod.collectives.operation_submission import synchronize
from torsh_distributed.migrate.horovod.collectives.reduction_names import Adasum


@dataclass
class AdasumSettings:
    """How steps are folded."""

    names: dict[nn.Parameter, str]
    compression: type[Compressor] | Compressor
    passes: int


class AdasumOptimizer(Optimizer):
    """Mixed in before the class of the wrapped optimizer; `DistributedOptimizer(op=Adasum)` makes such a class."""

    _adasum: AdasumSettings

    @property
    def _parameter_names(self) -> dict[nn.Parameter, str]:
        return self._adasum.names

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Note how many backward passes come before a step; their gradients add up on this rank."""
        if passes <= 0:
            raise InvalidArgument("backward_passes_per_step must be above 0", got=passes)
        self._adasum.passes = passes

    def synchronize(self) -> None:
        """Nothing to wait for: steps are folded, not gradients."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Has no meaning here: AssertionError."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        yield

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on this rank's gradients, fold the differences of all ranks, and move on from the starting point."""
        params = [param for group in self.param_groups for param in group["params"] if param.requires_grad]
        starts = [param.detach().clone() for param in params]
        loss = super().step() if closure is None else super().step(closure)
        settings = self._adasum
        with torch.no_grad():
            folded = []
            for param, start in zip(params, starts, strict=True):
                small, context = settings.compression.compress(param.detach() - start)
                name = f"adasum.{settings.names[param]}"
                folded.append((allreduce_async(small.contiguous(), name=name, op=Adasum), context))
            for param, start, (handle, context) in zip(params, starts, folded, strict=True):
                param.copy_(start + settings.compression.decompress(synchronize(handle), context))
        return loss

    def inner_step(self) -> Any:
        """The update alone, without any communication."""
        return super().step()
