"""Modules that keep their own forward and are adapted to a split model around it.

As in `sequence`, a module gets a class that extends its own: parameters and names stay.

Modules that work on this rank's piece of the sequence: sequence parallelism between split layers.
The module keeps its class as a base, its parameters and their names. Each rank computes its own positions, so the
gradients of the (whole) parameters are summed over the ranks in backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from typing_extensions import override

from torsh_distributed.parallel.tensor.regions import enter_split, splits_sequence, sum_parts, whole_input
from torsh_distributed.parallel.tensor.split_params import adopt, own_cuts, replicate_param


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


class SharedModule(SummedGradients):
    """A whole module applied to this rank's heads, such as a norm of queries: gradients are summed."""

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.summed_gradients():
            return super().forward(*args, **kwargs)


class LatentModule(nn.Module):
    """A whole layer of latent attention: its last outputs go to all heads directly, the others through a split layer.

    The layer after the others sums their gradient; that of the last `tail` is summed here.
    """

    tp_mesh: DeviceMesh
    tail: int

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = super().forward(*args, **kwargs)
        first, last = torch.split(out, [out.shape[-1] - self.tail, self.tail], dim=-1)
        return torch.cat([first, enter_split(last, self.tp_mesh.get_group())], dim=-1)


class SplitExperts(nn.Module):
    """Experts split by features: every rank computes a part of each token's result, and the parts are summed.

    in: (tokens, width) whole, then whatever the router says, of which weights get a gradient from every rank.
    """

    tp_mesh: DeviceMesh

    @override
    def forward(self, hidden: Tensor, *routing: Any, **named: Any) -> Any:
        group = self.tp_mesh.get_group()
        hidden = whole_input(hidden, self.tp_mesh)
        routing = tuple(_entered(value, self.tp_mesh) for value in routing)
        named = {name: _entered(value, self.tp_mesh) for name, value in named.items()}
        # What every rank adds as a whole is added in parts, so their sum is right.
        own = {name: self._parameters[name] for name in self._added_whole()}
        for name, param in own.items():
            assert param is not None, "named below"
            self._parameters[name] = cast(nn.Parameter, _PartOfSum.apply(param, group.size()))  # type: ignore[no-untyped-call]
        try:
            out = super().forward(hidden, *routing, **named)
        finally:
            self._parameters.update(own)
        if isinstance(out, tuple):
            return (sum_parts(out[0], group), *out[1:])
        return sum_parts(out, group)

    def _added_whole(self) -> list[str]:
        cuts = own_cuts(self)
        return [name for name, param in self._parameters.items() if param is not None and name not in cuts]


class IdentityExpert(nn.Module):
    """An expert that returns its input, among split ones: each rank adds its part."""

    tp_mesh: DeviceMesh

    @override
    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(hidden / self.tp_mesh.size(), *args, **kwargs)


class SummedModule(nn.Module):
    """A module of which every rank computes a part of the output: the parts are summed."""

    tp_mesh: DeviceMesh

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        return None if out is None else sum_parts(out, self.tp_mesh.get_group())


class KeyValueLinear(nn.Linear):
    """Keys or values of heads that the ranks cannot share evenly: computed whole, then taken for this rank's queries.

    in: (…, in_features), whole. out: (…, heads here × head_dim): for each query head of this rank the key or value head
    that it uses, so that queries and keys have equally many heads.
    """

    mesh: DeviceMesh
    num_key_value_heads: int
    heads: tuple[int, ...]
    """For each query head of this rank, its key or value head."""

    @classmethod
    def from_linear(cls, linear: nn.Linear, mesh: DeviceMesh, *, num_heads: int, num_key_value_heads: int) -> Self:
        """The same layer; it reuses the parameters of `linear`, which keep their identity."""
        layer = cls.__new__(cls)
        adopt(layer, linear)
        layer.mesh, layer.num_key_value_heads = mesh, num_key_value_heads
        here, per_group = num_heads // mesh.size(), num_heads // num_key_value_heads
        first = mesh.get_local_rank() * here
        layer.heads = tuple(head // per_group for head in range(first, first + here))
        for param in layer.parameters(recurse=False):
            replicate_param(param, mesh.get_group())
        return layer

    @override
    def forward(self, input: Tensor) -> Tensor:
        group = self.mesh.get_group()
        bias = None if self.bias is None else enter_split(self.bias, group)
        whole = functional.linear(whole_input(input, self.mesh), enter_split(self.weight, group), bias)
        by_head = whole.view(*whole.shape[:-1], self.num_key_value_heads, -1)
        mine: Tensor = by_head[..., list(self.heads), :].flatten(-2)
        return mine


def adapt(module: nn.Module, kind: type[nn.Module], mesh: DeviceMesh, **settings: Any) -> None:
    """Give a module, in place, a class that extends its own by `kind`."""
    for param in module.parameters(recurse=False):
        replicate_param(param, mesh.get_group())
    own = type(module)
    module.__class__ = type(f"{kind.__name__}{own.__name__}", (kind, own), {"tp_mesh": mesh, **settings})


def _entered(value: Any, mesh: DeviceMesh) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return enter_split(value, mesh.get_group())
    return value


class _PartOfSum(torch.autograd.Function):
    """A rank's part of what the ranks add up. Backward: the whole gradient, which each of them has."""

    @staticmethod
    @override
    def forward(ctx: Any, value: Tensor, size: int) -> Tensor:
        return value / size

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None
