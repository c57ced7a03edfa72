"""Replicas that take their steps alone: what keeps them together is the optimizer, through parameter servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from torsh_distributed.comm.collectives.moves import broadcast
from torsh_distributed.parallel.mesh.mesh_reduction import HeldGradients, clip_to_norm, grad_norm, mean_over
from torsh_distributed.parallel.state.held_state import MODEL, OPTIMIZER, HeldState, SavedState, named_tensors
from torsh_distributed.parallel.state.held_tensors import local_part_of
from torsh_distributed.parallel.strategy import PendingNumber, Strategy, check_one_device
from torsh_distributed.parallel.torch_internals import tree_map_only


class CommonParameters(Protocol):
    """What ranks that train apart have in common, outside of this package; every rank calls each of these."""

    has_common_state: bool
    """Whether the optimizer's state is that of all, too; otherwise each rank has its own."""

    def together(self) -> AbstractContextManager[None]:
        """Inside, parameters are the common ones, and so is the optimizer's state if there is one of all."""

    def spread(self) -> None:
        """What the first rank has becomes that of all."""

    def own_state(self) -> dict[str, Any]:
        """What this rank alone has."""

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Go on from `own_state()`."""


class LoneReplicas(Strategy):
    """Each rank trains a whole model on its share of the batches, at its own pace; clipping is by its own gradient."""

    common: CommonParameters
    """Set once the optimizer is there."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._device = check_one_device(model)
        self._group = dist.group.WORLD
        for tensor in [*model.parameters(), *model.buffers()]:
            broadcast(tensor.detach(), 0)

    @property
    @override
    def model(self) -> nn.Module:
        return self._model

    @property
    @override
    def unwrapped(self) -> nn.Module:
        return self._model

    @property
    @override
    def data_rank(self) -> int:
        return dist.get_rank()

    @property
    @override
    def data_degree(self) -> int:
        return dist.get_world_size()

    @property
    @override
    def steps_alone(self) -> bool:
        return True

    @property
    @override
    def num_sample_ranks(self) -> int:
        return 1

    @override
    def sum_over_samples(self, value: Tensor) -> Tensor:
        return value

    @override
    def accumulating(self, *, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    def mean_loss(self, loss: Tensor) -> PendingNumber:
        return _OwnNumber(loss)

    @override
    def mean_over_ranks(self, value: Tensor) -> PendingNumber:
        assert self._group is not None, "the process group is up"
        return mean_over(value, self._group)

    @override
    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        grads = [param.grad for param in self._model.parameters() if param.grad is not None]
        norm = grad_norm([HeldGradients(grads)], self._device)
        clip_to_norm(grads, norm, max_norm)
        return norm

    @override
    def take_comm_s(self) -> float | None:
        return None

    @contextmanager
    @override
    def together(self) -> Iterator[None]:
        with self.common.together():
            # Statistics of each rank's own samples: those of the first rank stand for all.
            for buffer in self._model.buffers():
                broadcast(buffer.detach(), 0)
            yield

    # State: the common parameters are the model's; what each rank has besides goes to its own part of a checkpoint.

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.common.own_state()

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            self.common.load_own_state(dict(state))

    @override
    def whole_state(self, optimizer: Optimizer) -> dict[str, Any]:
        with self.together():
            state = super().whole_state(optimizer)
            found: dict[str, Any] = tree_map_only(Tensor, torch.clone, state)
        if not self.common.has_common_state:
            found["optimizer"]["state"] = {}
        return found

    @override
    def whole_tensors(self) -> Iterator[tuple[str, Any]]:
        with self.together():
            yield from super().whole_tensors()

    @override
    def load_whole_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        super().load_whole_state(optimizer, state)
        self.common.spread()

    @override
    def held_state(self, optimizer: Optimizer) -> HeldState:
        """Of copies: it is read later, when parameters may be this rank's own again."""
        with self.together():
            found = super().held_state(optimizer)
            values = {name: value.detach().clone() for name, value in named_tensors(self._model)}
        copied = [
            replace(held, read=partial(local_part_of, values[held.name.removeprefix(f"{MODEL}.")]))
            for held in found.tensors
            if held.name.startswith(f"{MODEL}.")
        ]
        if self.common.has_common_state:
            copied += [held for held in found.tensors if held.name.startswith(f"{OPTIMIZER}.")]
        else:
            found.values[OPTIMIZER]["plain"] = {}
        return HeldState(copied, found.values)

    @override
    def load_held_state(self, optimizer: Optimizer, saved: SavedState, *, with_optimizer: bool = True) -> None:
        super().load_held_state(optimizer, saved, with_optimizer=with_optimizer)
        self.common.spread()


class _OwnNumber(PendingNumber):
    """A number that no other rank has a part in."""

    def __init__(self, value: Tensor) -> None:
        self._value = value

    @override
    def wait(self) -> float:
        return float(self._value)
