"""The strategy for a mesh with a pipeline: each stage is split, sharded or replicated over the other axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from torsh_distributed.compress.compressor import GradientCompressor
from torsh_distributed.parallel.composed.split_model import SequenceContext, SplitModel
from torsh_distributed.parallel.composed.stage_shards import StageAverage, StageShards
from torsh_distributed.parallel.expert.expert_strategy import balance_load
from torsh_distributed.parallel.mesh.mesh import Mesh
from torsh_distributed.parallel.models.label_share import LabelRule, PartCounts, own_loss
from torsh_distributed.parallel.pipeline import PipelineParallel
from torsh_distributed.parallel.strategy import ComputeLoss, LossFn


class PipelineStages(SplitModel):
    """A model in stages over pp, each split over tp and cp, sharded over shard and replicated over dp.

    Forward runs the whole schedule, including backward; the backward of the returned loss only adds the gradients to
    the parameters. The Engine announces the loss scale before forward (`expect_scale`), so gradients are scaled from
    the start and the Engine drives a pipeline like any other strategy. `adding` wraps the loss_fn to include losses
    that the stages carried along.
    """

    def __init__(
        self,
        pipe: PipelineParallel,
        whole_model: nn.Module,
        mesh: Mesh,
        *,
        average: StageAverage,
        shards: StageShards | None = None,
        context: SequenceContext | None = None,
        adding: Callable[[LossFn], LossFn] | None = None,
        device: torch.device,
    ) -> None:
        self.pipe = pipe
        self._average, self._shards, self._context = average, shards, context
        self._adding = adding
        self._is_last = True
        self._scale = 1.0
        self._rank_of: dict[str, int] = {}
        for stage in pipe.plan.stages:
            for name in (*stage.layers, *stage.direct):
                self._rank_of.setdefault(name, pipe.stage_of[stage.index])
        super().__init__(mesh, whole_model, device=device)
        self._params = [param for param in pipe.module.parameters() if param.requires_grad]

    @property
    @override
    def model(self) -> nn.Module:
        return self.pipe.module

    @property
    @override
    def unwrapped(self) -> nn.Module:
        return self.pipe.module

    @property
    @override
    def rows_multiple(self) -> int:
        return self.pipe.config.num_microbatches

    @override
    def accumulating(self, *, is_last: bool) -> AbstractContextManager[None]:
        return self._remembering(is_last)

    @contextmanager
    def _remembering(self, is_last: bool) -> Iterator[None]:
        self._is_last = is_last
        yield

    @override
    def expect_scale(self, scale: Tensor | float) -> None:
        self._scale = float(scale)

    @property
    @override
    def splits_loss(self) -> bool:
        return True

    @override
    def count_labels(self, rule: LabelRule, parts: PartCounts | None = None) -> None:
        self.pipe.plan.microbatches.labels = rule
        self.pipe.plan.microbatches.counts = parts if self._context is None else None
        if self._context is not None:
            self._context.labels = rule
            self._context.counts = None if parts is None or not rule.is_uniform else parts

    @override
    def weighs_by_loss(self, *, has_several: bool) -> bool:
        return self._context is None and not has_several

    @override
    def take_count(self) -> Tensor | None:
        return self.pipe.take_count()

    @override
    def loss(self, model: nn.Module, batch: Any, loss_fn: LossFn | None, compute: ComputeLoss) -> Tensor:
        self.pipe.loss_fn = loss_fn
        if self._adding is not None:
            self.pipe.loss_fn = self._adding(loss_fn or self._own_loss)
        part = batch if self._context is None else self._context.take(batch, has_loss_fn=loss_fn is not None)
        inputs, targets = (part, None) if loss_fn is None else part
        weight = None if self._context is None else self._context.weight
        with nullcontext() if self._context is None else self._context.attending():
            if torch.is_grad_enabled():
                return self._run(inputs, targets, 1.0 if weight is None else weight)
            loss = self.pipe.evaluate(inputs, targets)
        return loss if weight is None else loss * weight

    def _own_loss(self, output: Any, _: object) -> Tensor:
        return own_loss(output, type(self.pipe.plan.model).__name__)

    def _run(self, inputs: Any, targets: Any, weight: Tensor | float) -> Tensor:
        """Run the schedule; its gradients are kept aside until backward is called."""
        before = [param.grad for param in self._params]
        for param in self._params:
            param.grad = None
        value = self.pipe.step(inputs, targets, scale=self._scale, weight=weight)
        found = [param.grad for param in self._params]
        for param, grad in zip(self._params, before, strict=True):
            param.grad = grad
        start = torch.ones((), device=value.device, requires_grad=True)
        held = self._scale * self.pipe.held
        out: Tensor = _DeferredBackward.apply(start, value, self, found, held)  # type: ignore[no-untyped-call]  # untyped in torch
        return out

    def add_gradients(self, grads: list[Tensor | None], factor: float) -> None:
        """Add a schedule's gradients, times `factor`, to those of the parameters; average if the step is complete."""
        for param, grad in zip(self._params, grads, strict=True):
            if grad is None:
                continue
            scaled = grad if math.isclose(factor, 1.0, rel_tol=1e-6) else grad.mul_(factor)
            param.grad = scaled if param.grad is None else param.grad.add_(scaled)
        if self._is_last:
            self._average.average()

    @override
    def attach(self, optimizer: Optimizer) -> None:
        balance_load(self.model, optimizer, has_owners=optimizer in self._owner_updates)
        if self._shards is not None:
            self._shards.attach(optimizer)

    @property
    @override
    def compressor(self) -> GradientCompressor | None:
        return self._average.compressor

    @override
    def rescale(self, factor: float) -> None:
        super().rescale(factor)
        if self._shards is not None:
            self._shards.rescale(factor)

    @override
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() if self._shards is None else self._shards.state_dict()

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._shards is None:
            super().load_state_dict(state)
        else:
            self._shards.load_state_dict(state)

    @override
    def reshard(self) -> None:
        if self._shards is not None:
            self._shards.reshard()

    @override
    def take_comm_s(self) -> float | None:
        return None

    @override
    def _num_tied(self, name: str) -> int:
        return self.pipe.tied.copies.get(name, 1)

    @override
    def _owner(self, name: str) -> int:
        prefix = name
        while prefix:
            if prefix in self._rank_of:
                return self._rank_of[prefix]
            prefix = prefix.rpartition(".")[0]
        return 0

    @override
    def _names(self) -> Mapping[str, str]:
        return self.pipe.tied.names


class _DeferredBackward(torch.autograd.Function):
    """The loss of a schedule that has already run; its backward adds the gradients to the parameters."""

    @staticmethod
    @override
    def forward(
        ctx: Any, start: Tensor, value: Tensor, owner: PipelineStages, grads: list[Tensor | None], scale: float
    ) -> Tensor:
        ctx.owner, ctx.grads, ctx.scale = owner, grads, scale
        return value.clone()

    @staticmethod
    @override
    def backward(ctx: Any, *scales: Tensor) -> Any:
        # The announced scale is in the gradients already; at 0, where nothing counts, they are 0.
        ctx.owner.add_gradients(ctx.grads, float(scales[0]) / ctx.scale if ctx.scale else 1.0)
        return None, None, None, None, None
