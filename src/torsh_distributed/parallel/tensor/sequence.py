"""Modules that work on this rank's piece of the sequence: sequence parallelism between split layers.

The module keeps its class as a base, its parameters and their names. Each rank computes its own positions, so the
gradients of the (whole) parameters are summed over the ranks in backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from typing_extensions import override

from torsh_distributed.parallel.tensor.activations import splits_sequence
from torsh_distributed.parallel.tensor.regions import enter_split
from torsh_distributed.parallel.tensor.split_params import replicate_param


def work_on_sequence(module: nn.Module, mesh: DeviceMesh) -> None:
    """Change a norm or position table, in place, to work on its piece of the sequence."""
    mixin = _OnPositions if isinstance(module, nn.Embedding) else _OnSequence
    for param in module.parameters(recurse=False):
        replicate_param(param, mesh.get_group())
    base = type(module)
    module.__class__ = type(f"Sequence{base.__name__}", (mixin, base), {"tp_mesh": mesh})


class SummedGradients(nn.Module):
    """A module whose parameters see a part of the data: their gradients are summed over the ranks."""

    tp_mesh: DeviceMesh

    @contextmanager
    def summed_gradients(self) -> Iterator[None]:
        """Inside, the gradients of the parameters are summed over the ranks."""
        own = dict(self._parameters)
        group = self.tp_mesh.get_group()
        for name, param in own.items():
            if param is not None:
                self._parameters[name] = cast(nn.Parameter, enter_split(param, group))
        try:
            yield
        finally:
            self._parameters.update(own)


class _OnSequence(SummedGradients):
    """In and out: a DTensor split along the sequence. A plain (whole) input is not split."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        if not isinstance(input, DTensor):
            return cast(Tensor, super().forward(input))
        with self.summed_gradients():
            out = super().forward(input.to_local())
        return DTensor.from_local(out, self.tp_mesh, input.placements, run_check=False)


class _OnPositions(SummedGradients):
    """In: whole positions (…, length). Out: a DTensor (…, length, width) split along the sequence."""

    @override
    def forward(self, input: Tensor) -> Any:
        length = input.shape[-1]
        if not splits_sequence(length, self.tp_mesh):
            return super().forward(input)
        step = length // self.tp_mesh.size()
        mine = input.narrow(-1, self.tp_mesh.get_local_rank() * step, step)
        with self.summed_gradients():
            out = super().forward(mine)
        return DTensor.from_local(out, self.tp_mesh, [Shard(input.dim() - 1)], run_check=False)
