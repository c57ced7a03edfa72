"""The strategy for a mesh with a pipeline: stages on ranks, each split, sharded or replicated over the other axes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.composed.strategy import OnMesh
from torsh_distributed.parallel.expert.gradients import SpreadGradients
from torsh_distributed.parallel.expert.stacks import spread_params
from torsh_distributed.parallel.expert.strategy import balance_load
from torsh_distributed.parallel.mesh import Mesh
from torsh_distributed.parallel.pipeline import PipelineParallel
from torsh_distributed.parallel.strategy import ComputeLoss, LossFn


class PipelineStages(OnMesh):
    """A model in stages over pp, each split over tp and replicated over dp.

    Forward runs the whole schedule, backward included; the loss it returns has a backward that hands the gradients out,
    scaled as the loss is. So the Engine drives a pipeline as it drives anything else.
    """

    def __init__(
        self,
        make: Callable[[LossFn], PipelineParallel],
        whole_model: nn.Module,
        mesh: Mesh,
        *,
        device: torch.device,
    ) -> None:
        self._is_last = True
        self._loss_fn: LossFn | None = None
        self.pipe = make(self._call_loss)
        self._places: dict[str, int] = {}
        for stage in self.pipe.plan.stages:
            for name in (*stage.layers, *stage.direct):
                self._places.setdefault(name, self.pipe.stage_of[stage.index])
        super().__init__(mesh, whole_model, device=device)
        self._params = [param for param in self.pipe.module.parameters() if param.requires_grad]
        self._averaged = SpreadGradients(self._params, [param for _, param in spread_params(self.model).values()], mesh)

    @override
    def attach(self, optimizer: Optimizer) -> None:
        balance_load(self.model, optimizer)

    @property
    @override
    def model(self) -> nn.Module:
        return self.pipe.module

    @property
    @override
    def unwrapped(self) -> nn.Module:
        return self.pipe.module

    @override
    def accumulating(self, *, is_last: bool) -> AbstractContextManager[None]:
        return self._remembering(is_last)

    @contextmanager
    def _remembering(self, is_last: bool) -> Iterator[None]:
        self._is_last = is_last
        yield

    @override
    def loss(self, model: nn.Module, batch: Any, loss_fn: LossFn | None, compute: ComputeLoss) -> Tensor:
        if loss_fn is None:
            raise InvalidArgument(
                "a pipeline needs a loss_fn: only its last stage sees the output",
                hint="parallelize(model, optimizer, plan, loss_fn=loss_fn), with batches of (inputs, targets)",
            )
        self._loss_fn = loss_fn
        inputs, targets = batch
        if not torch.is_grad_enabled():
            return self.pipe.evaluate(inputs, targets)
        before = [param.grad for param in self._params]
        for param in self._params:
            param.grad = None
        value = self.pipe.step(inputs, targets)
        found = [param.grad for param in self._params]
        for param, grad in zip(self._params, before, strict=True):
            param.grad = grad
        start = torch.ones((), device=value.device, requires_grad=True)
        out: Tensor = _HandOut.apply(start, value, self, found)  # type: ignore[no-untyped-call]  # untyped in torch
        return out

    def hand_out(self, grads: list[Tensor | None], scale: Tensor) -> None:
        """Add a schedule's gradients, times `scale`, to the parameters'; average them if the step is complete."""
        factor = float(scale)
        for param, grad in zip(self._params, grads, strict=True):
            if grad is None:
                continue
            scaled = grad if factor == 1.0 else grad.mul_(factor)
            param.grad = scaled if param.grad is None else param.grad.add_(scaled)
        if self._is_last:
            self._averaged.average()

    def _call_loss(self, output: Any, targets: Any) -> Tensor:
        assert self._loss_fn is not None, "loss() sets it"
        return self._loss_fn(output, targets)

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
            if prefix in self._places:
                return self._places[prefix]
            prefix = prefix.rpartition(".")[0]
        return 0

    @override
    def _names(self) -> Mapping[str, str]:
        return self.pipe.tied.names


class _HandOut(torch.autograd.Function):
    """The loss of a step that has run already; its backward gives the gradients to the parameters."""

    @staticmethod
    @override
    def forward(ctx: Any, start: Tensor, value: Tensor, owner: PipelineStages, grads: list[Tensor | None]) -> Tensor:
        ctx.owner, ctx.grads = owner, grads
        return value.clone()

    @staticmethod
    @override
    def backward(ctx: Any, *scales: Tensor) -> Any:
        ctx.owner.hand_out(ctx.grads, scales[0])
        return None, None, None, None
