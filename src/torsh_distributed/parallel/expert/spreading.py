"""Experts on a mesh with further axes: spreads them over ranks, and says how FSDP2 shards them.

Auxiliary losses of a model in pipeline stages: sent with the activations to the stage that computes the loss.
Why not per stage: this way they enter the gradient once, at the scale of the loss, under every schedule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from typing_extensions import override

from torsh_distributed.parallel.expert.layer import MoELayer, moe_layers, staged_auxiliary_loss
from torsh_distributed.parallel.expert.placed_experts import placed_experts
from torsh_distributed.parallel.local_tensors import whole_of
from torsh_distributed.parallel.mesh.layout import GRADIENT_AXES, REPLICA_AXES
from torsh_distributed.parallel.mesh.mesh import Mesh
from torsh_distributed.parallel.sharded.module import SeparateShards
from torsh_distributed.parallel.strategy import LossFn


def spread_experts(model: nn.Module, mesh: Mesh) -> None:
    """Keep each rank's own experts, in place, and make layers count over all ranks that share a batch.

    Every rank calls this, with equal weights. Ranks along `cp` have different tokens; ranks along `tp` have the same
    ones and compute the layer equally. Layers in pipeline stages of other ranks are left alone.
    """
    _spread(model, mesh, lambda _, stack: not stack.is_meta)


def spread_on_meta(model: nn.Module, mesh: Mesh, names: Collection[str] | None = None) -> None:
    """The same for a model without values, so that a rank gets no others: parameters in `names`, by default all."""
    _spread(model, mesh, lambda name, _: names is None or name in names)


def _spread(model: nn.Module, mesh: Mesh, is_here: Callable[[str, Tensor], bool]) -> None:
    all_placed, layers = placed_experts(model), moe_layers(model)
    if not (all_placed or layers):
        return
    # Made by ranks whose stage has no experts, too: c10d names a group by how many a rank has, and all must agree.
    group, everyone = mesh.group("ep"), mesh.group(*GRADIENT_AXES)
    tensor = mesh.slice("tp") if layers and mesh.layout.degree("tp") > 1 else None
    for name, placed in all_placed.items():
        first, stack = next(iter(placed.stacked().items()))
        if placed.group is None and is_here(f"{name}.{first}" if name else first, stack):
            placed.spread(group)
    for name, layer in layers.items():
        if not is_here(f"{name}.experts.up" if name else "experts.up", layer.experts.up):
            continue
        layer.spread(group, everyone)
        if tensor is not None:
            _take_whole(layer, tensor)


def expert_sharding(model: nn.Module, mesh: Mesh) -> SeparateShards | None:
    """How FSDP2 shards spread experts; None if every rank has all experts and they are sharded like the rest."""
    ours = tuple(layer.experts for layer in moe_layers(model).values() if layer.group is not None)
    spread = (*ours, *(placed.module for placed in placed_experts(model).values() if placed.group is not None))
    if not spread:
        return None
    replicas = tuple(axis for axis in REPLICA_AXES if axis != "shard")
    return SeparateShards(spread, mesh.grid(replicas, "shard"), divisor=mesh.layout.degree(*GRADIENT_AXES))


def _take_whole(layer: MoELayer, mesh: DeviceMesh) -> None:
    """Let the layer accept and return tokens that are split over `mesh`, as in sequence parallelism."""
    split: list[DTensor] = []

    def gather(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        (tokens,) = inputs
        split.clear()
        if not isinstance(tokens, DTensor):
            return None
        split.append(tokens)
        return (tokens.redistribute(placements=[Replicate()]).to_local(),)

    def cut(_: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor | None:
        assert layer.decision is not None, "forward made it"
        loss = plain_gradient(layer.decision.auxiliary_loss)
        layer.decision = dataclasses.replace(layer.decision, auxiliary_loss=loss)
        if not split:
            return None
        placements = split.pop().placements
        return DTensor.from_local(out, mesh, [Replicate()], run_check=False).redistribute(placements=placements)

    layer.register_forward_pre_hook(gather)
    layer.register_forward_hook(cut)


def plain_gradient(value: Tensor) -> Tensor:
    """The value unchanged; its gradient is a plain tensor even if it is added to a loss from split logits."""
    out: Tensor = _PlainGradient.apply(value)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


class _PlainGradient(Function):
    @staticmethod
    @override
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = grads[0]
        return whole_of(grad)


class StagedAuxiliaryLoss:
    """Passes the sum of auxiliary losses from stage to stage; the loss gets it as `auxiliary_loss(model)`.

    A microbatch's loss is computed right after its last stage, so the sum that arrived last belongs to it.
    """

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._arrived: Tensor | None = None

    def wrap_stage(self, index: int, stage: nn.Module) -> nn.Module:
        """The stage, with the sum so far as a further input and output."""
        is_last = index == self._num_stages - 1
        return _StageWithAuxiliaryLoss(stage, is_first=index == 0, keep=self._keep if is_last else None)

    def wrap_loss(self, loss_fn: LossFn) -> LossFn:
        """The same loss; while it is computed, `auxiliary_loss(model)` is the sum that arrived."""

        def loss_of(output: Any, targets: Any) -> Tensor:
            assert self._arrived is not None, "the last stage has run"
            arrived = plain_gradient(self._arrived)
            token = staged_auxiliary_loss.set(arrived)
            try:
                loss = loss_fn(output, targets)
            finally:
                staged_auxiliary_loss.reset(token)
            # Stages expect a gradient even if the loss does not use the sum.
            return loss + 0 * arrived

        return loss_of

    def _keep(self, total: Tensor) -> None:
        self._arrived = total


class _StageWithAuxiliaryLoss(nn.Module):
    """A stage that takes the sum of the earlier stages as its last input and returns it as its last output."""

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
        total = torch.stack(mine).sum(dim=0, keepdim=True) if mine else torch.zeros(1, device=_device(out))
        if not self._is_first:
            total = inputs[-1] + total
        if self._keep is not None:
            self._keep(total.squeeze(0))
            return out
        return (*(out if isinstance(out, tuple) else (out,)), total)


def _device(out: Any) -> torch.device:
    value: Tensor = out[0] if isinstance(out, tuple) else out
    return value.device
