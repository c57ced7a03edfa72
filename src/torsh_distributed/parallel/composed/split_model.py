"""Strategies for models that a mesh splits, and the one for tensor and context axes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from torsh_distributed.compress.compressor import GradientCompressor
from torsh_distributed.parallel.composed.split_state import ModelSplit
from torsh_distributed.parallel.expert.stacked_experts import spread_params
from torsh_distributed.parallel.local_tensors import whole_of
from torsh_distributed.parallel.mesh.layout import GRADIENT_AXES, MESH_ORDER
from torsh_distributed.parallel.mesh.mesh import Mesh
from torsh_distributed.parallel.mesh.mesh_reduction import (
    HeldGradients,
    MeshStrategy,
    clip_to_norm,
    grad_norm,
    mean_over,
)
from torsh_distributed.parallel.models.label_share import LabelRule, PartCounts
from torsh_distributed.parallel.sharded.sharded_strategy import Sharded
from torsh_distributed.parallel.state.whole_state import StateParts, named_params, plain_name
from torsh_distributed.parallel.strategy import ComputeLoss, LossFn, PendingNumber, Strategy
from torsh_distributed.parallel.tensor import cut_lengths, param_cuts
from torsh_distributed.parallel.whole_tensors.model_pieces import ModelPieces, cut_form, shard_form
from torsh_distributed.parallel.whole_tensors.optimizer_needs import PieceForm

Context = Callable[[], AbstractContextManager[None]]
"""Entered around forward and backward."""


class SequenceContext(Protocol):
    """Splits the sequences of batches over ranks."""

    labels: LabelRule
    """Which labels the loss counts."""
    counts: PartCounts | None
    """What else it counts, in place of them."""

    @property
    def weight(self) -> Tensor | None:
        """What the loss of the batch taken last is multiplied by; None: nothing."""

    def take(self, batch: Any, *, has_loss_fn: bool) -> Any:
        """The part of a batch that this rank works on."""

    def attending(self) -> AbstractContextManager[None]:
        """Around forward and backward of a part."""


class SplitModel(MeshStrategy):
    """What all combinations share: means, norms and state over the axes of a mesh."""

    def __init__(self, mesh: Mesh, whole_model: nn.Module, *, device: torch.device) -> None:
        super().__init__(mesh)
        self._device = device
        self._cuts = {plain_name(name): cut for name, cut in param_cuts(whole_model).items()}
        self._split = ModelSplit(
            whole_model,
            self._cuts,
            mesh.group("tp"),
            mesh.group("pp"),
            self._owner,
            self._names(),
            {name: layer for name, (layer, _) in spread_params(whole_model).items()},
            {plain_name(name): length for name, length in cut_lengths(whole_model).items()},
        )

    @override
    def mean_loss(self, loss: Tensor) -> PendingNumber:
        return mean_over(loss, self._mesh.group(*GRADIENT_AXES))

    @override
    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        named = {name: param.grad for name, param in named_params(self.unwrapped).items() if param.grad is not None}
        by_copies: dict[int, list[Tensor]] = {}
        for name, grad in named.items():
            by_copies.setdefault(self._num_copies(name, isinstance(grad, DTensor)), []).append(grad)
        everyone = (self._mesh.group(*MESH_ORDER),)
        held = [HeldGradients(grads, everyone, num_copies) for num_copies, grads in by_copies.items()]
        norm = grad_norm(held or [HeldGradients((), everyone)], self._device)
        clip_to_norm(named.values(), norm, max_norm)
        return norm

    def _num_copies(self, name: str, is_sharded: bool) -> int:
        """The number of ranks that hold the same piece of a gradient."""
        split = {"shard": is_sharded, "tp": name in self._cuts, "ep": name in self._split.experts, "pp": True}
        axes = [axis for axis in MESH_ORDER if not split.get(axis)]
        return self._mesh.layout.degree(*axes) * self._num_tied(name)

    def _num_tied(self, name: str) -> int:
        return 1

    def _owner(self, name: str) -> int:
        return 0

    def _names(self) -> Mapping[str, str]:
        return {}

    @property
    @override
    def whole_model(self) -> nn.Module:
        return self._split.model

    @property
    @override
    def has_whole_forward(self) -> bool:
        return False

    @override
    def shared_names(self) -> dict[str, str]:
        tied = {name: first for name, first in self._split.names.items() if name != first}
        return {**super().shared_names(), **tied}

    @override
    def state_parts(self) -> StateParts:
        return self._split

    @override
    def pieces(self) -> ModelPieces | None:
        mesh, tp, ep = self._mesh, self._mesh.group("tp"), self._mesh.group("ep")
        if mesh.layout.degree("shard", "tp", "ep", "pp") == 1:
            return None
        forms: list[PieceForm] = []
        sharded = next((param for param in self.unwrapped.parameters() if isinstance(param, DTensor)), None)
        if sharded is not None:
            forms.append(shard_form(sharded.device_mesh))
        forms += [cut_form(dim, tp) for dim in (0, 1) if tp.size() > 1]
        forms += [cut_form(0, ep)] if ep.size() > 1 and self._split.experts else []
        return ModelPieces(mesh.group("shard", "tp", "ep"), forms, has_all_params=mesh.layout.degree("pp") == 1)


class Composed(SplitModel):
    """A model split over tp or cp, replicated or sharded by an inner strategy over the other axes."""

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        *,
        inner: Strategy | None,
        contexts: tuple[Context, ...],
        context: SequenceContext | None,
        device: torch.device,
    ) -> None:
        self._alone = model
        self._inner = inner
        self._contexts = contexts
        self._is_inside = False
        self._context = context
        super().__init__(mesh, model, device=device)

    @property
    @override
    def model(self) -> nn.Module:
        return self._alone if self._inner is None else self._inner.model

    @property
    @override
    def unwrapped(self) -> nn.Module:
        return self._alone if self._inner is None else self._inner.unwrapped

    @override
    def attach(self, optimizer: Optimizer) -> None:
        if self._inner is not None:
            self._inner._owner_updates = self._owner_updates
            self._inner.attach(optimizer)

    @override
    def loss(self, model: nn.Module, batch: Any, loss_fn: LossFn | None, compute: ComputeLoss) -> Tensor:
        part = batch if self._context is None else self._context.take(batch, has_loss_fn=loss_fn is not None)
        with self._entered():
            value = compute(model, part, loss_fn)
            # Computed from split logits it is a DTensor, equal on all ranks.
            whole = whole_of(value)
        weight = None if self._context is None else self._context.weight
        return whole if weight is None else whole * weight

    @property
    @override
    def splits_loss(self) -> bool:
        return self._context is not None

    @override
    def count_labels(self, rule: LabelRule, parts: PartCounts | None = None) -> None:
        if self._context is not None:
            self._context.labels = rule
            self._context.counts = None if parts is None or not rule.is_uniform else parts

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """Enter the contexts once: in training by `accumulating`, in evaluation here."""
        if self._is_inside:
            yield
            return
        self._is_inside = True
        try:
            with ExitStack() as stack:
                for context in self._contexts:
                    stack.enter_context(context())
                yield
        finally:
            self._is_inside = False

    @override
    def accumulating(self, *, is_last: bool) -> AbstractContextManager[None]:
        return self._accumulating(is_last)

    @contextmanager
    def _accumulating(self, is_last: bool) -> Iterator[None]:
        with ExitStack() as stack:
            if self._inner is not None:
                stack.enter_context(self._inner.accumulating(is_last=is_last))
            stack.enter_context(self._entered())
            yield

    @override
    def before_backward(self, loss: Tensor) -> None:
        if self._inner is not None:
            self._inner.before_backward(loss)

    @override
    def after_backward(self, loss: Tensor) -> None:
        if self._inner is not None:
            self._inner.after_backward(loss)

    @override
    def take_comm_s(self) -> float | None:
        return None if self._inner is None else self._inner.take_comm_s()

    @property
    @override
    def compressor(self) -> GradientCompressor | None:
        return None if self._inner is None else self._inner.compressor

    @override
    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        if isinstance(self._inner, Sharded):
            self._inner.wrapped.average_replicated()
        return super().clip_grad_norm(max_norm)

    @override
    def reshard(self) -> None:
        if isinstance(self._inner, Sharded):
            self._inner.wrapped.reshard()
