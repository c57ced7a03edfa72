"""A model as one process has it, kept while it is split: its structure, and its tensors for one comparison."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from torsh_distributed.parallel.expert.layer import auxiliary_loss, moe_layers, staged_auxiliary_loss
from torsh_distributed.parallel.torch_internals import tree_map
from torsh_distributed.train.batches import Batch
from torsh_distributed.train.comparing.forward_changes import ForwardState
from torsh_distributed.train.loss import LossFn, loss_of


class WholeCopy:
    """The modules of a model, copied before it is split; without its parameters, which `put` gives it."""

    def __init__(self, model: nn.Module) -> None:
        """Raises whatever a module of the model raises that cannot be copied."""
        known: dict[int, Any] = {
            id(param): nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
            for param in model.parameters()
        }
        for module in model.modules():
            # A weight that is computed from parameters, as by weight_norm, has a graph, which torch does not copy.
            computed = [value for value in vars(module).values() if isinstance(value, Tensor) and value.grad_fn]
            known.update({id(value): value.detach().clone() for value in computed})
        self.model = copy.deepcopy(model, known)
        self._made: dict[int, nn.Parameter] = {}
        self._replaced: list[nn.Parameter] = []
        self._stands_for: dict[int, tuple[str, Tensor]] = {}
        self.reads: dict[str, tuple[int, ...]] = {}
        """Shapes of the parameters that the losses of its runs have read, by name."""
        self.changed: dict[str, Tensor] = {}
        """The buffers that the last run has changed, by name."""
        self.moved: list[str] = []
        """Names of the parameters and numbers that its forward has changed."""

    @property
    def num_bytes(self) -> int:
        """What its parameters take."""
        return sum(param.numel() * param.element_size() for param in self.model.parameters())

    def put(self, name: str, value: Any) -> None:
        """Set one entry of the model's state, whole; a parameter that is shared stays shared."""
        where, _, last = name.rpartition(".")
        if not isinstance(value, Tensor):
            return
        owner = self.model.get_submodule(where)
        if last in owner._buffers:
            owner._buffers[last] = value.detach().clone()
            return
        old = owner._parameters[last]
        assert old is not None, "it has an entry in the state"
        if id(old) not in self._made:
            self._made[id(old)] = nn.Parameter(value.detach().clone(), requires_grad=old.requires_grad)
            self._replaced.append(old)  # ids stay those of living objects
        owner._parameters[last] = self._made[id(old)]

    def stand_in_for(self, params: Mapping[str, Tensor]) -> None:
        """Where a loss reads one of `params`, those of the split model that it was written with, it gets ours."""
        own = dict(self.model.named_parameters(remove_duplicate=False))
        self._stands_for = {id(params[name]): (name, param) for name, param in own.items()}

    def loss(self, batch: Batch, loss_fn: LossFn | None) -> Tensor:
        """The loss of `batch`."""
        if loss_fn is None:
            return loss_of(self.model, batch, None)

        def with_ours(outputs: Any, targets: Any) -> Any:
            auxiliary = auxiliary_loss(self.model) if moe_layers(self.model) else None
            token = staged_auxiliary_loss.set(auxiliary)
            try:
                with _Replacing(self._stands_for, self.reads):
                    return loss_fn(outputs, targets)
            finally:
                staged_auxiliary_loss.reset(token)

        return loss_of(self.model, batch, with_ours)

    def run(self, batch: Batch, loss_fn: LossFn | None) -> float:
        """The loss of `batch`; gradients are in the parameters."""
        self.model.zero_grad(set_to_none=True)
        before = ForwardState(self.model)
        loss = self.loss(batch, loss_fn)
        self.changed = {name: one.clone() for name, one in before.changed_buffers().items()}
        self.moved = [name for name in before.changed() if name not in self.changed]
        loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        return float(loss.detach())

    def gradients(self) -> dict[str, Tensor]:
        """Those of the last run, by name; a shared parameter under its first one."""
        found = {name: param.grad for name, param in self.model.named_parameters() if param.grad is not None}
        return {name: grad.to_dense() if grad.is_sparse else grad for name, grad in found.items()}


class _Replacing(TorchFunctionMode):
    """Gives functions other tensors in place of some, by id, and notes the names of those."""

    def __init__(self, others: Mapping[int, tuple[str, Tensor]], seen: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self._others, self._seen = others, seen

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*tree_map(self._other, args), **tree_map(self._other, dict(kwargs or {})))

    def _other(self, value: Any) -> Any:
        found = self._others.get(id(value))
        if found is None:
            return value
        self._seen[found[0]] = tuple(found[1].shape)
        return found[1]
