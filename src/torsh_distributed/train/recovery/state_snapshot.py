"""A copy of the training state in memory, to go back to: what this rank holds, nothing gathered, nothing written."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from torsh_distributed.checkpoint.random_generators import random_state, restore_random_state
from torsh_distributed.errors import InternalError
from torsh_distributed.parallel.state.held_state import SavedState, SavedTensor
from torsh_distributed.parallel.state.held_tensors import WholeLayout
from torsh_distributed.train.checkpointing import Resumable


class StateSnapshot(SavedState):
    """The state of an Engine after a step; every rank makes one and restores one at the same point."""

    def __init__(self, engine: Resumable) -> None:
        engine.settle()
        state = engine.strategy.held_state(engine.optimizer)
        self._copies = {held.name: held.read().detach().clone() for held in state.tensors}
        self.tensors = {held.name: SavedTensor(held.layout.shape, held.dtype) for held in state.tensors}
        self.values = copy.deepcopy(state.values)
        self.num_steps = engine.num_steps
        self._rest: dict[str, Any] = copy.deepcopy(
            {
                "precision": engine.precision.state_dict(),
                "learning_rate": engine.learning_rate.state_dict(),
                "strategy": engine.strategy.state_dict(),
                "ledger": engine.ledger.state_dict(),
                "num_skipped": engine.num_skipped,
            }
        )
        self._random = random_state()

    @property
    def num_bytes(self) -> int:
        """Memory that the copies take on this rank."""
        return sum(one.numel() * one.element_size() for one in self._copies.values())

    @override
    def fill(self, name: str, layout: WholeLayout, local: Tensor) -> None:
        kept = self._copies[name]
        if kept.shape != local.shape:
            raise InternalError(
                f"{name} has another shape than its copy", copy=tuple(kept.shape), tensor=tuple(local.shape)
            )
        with torch.no_grad():
            local.copy_(kept)

    def restore(self, engine: Resumable, *, with_data: bool) -> None:
        """Go back to this state; `with_data` also where its data stood, so that their batches are repeated."""
        engine.strategy.load_held_state(engine.optimizer, self)
        rest = copy.deepcopy(self._rest)
        engine.precision.load_state_dict(rest["precision"])
        engine.learning_rate.load_state_dict(rest["learning_rate"], data_degree=engine.strategy.data_degree)
        engine.strategy.load_state_dict(rest["strategy"])
        engine.num_steps, engine.num_skipped = self.num_steps, rest["num_skipped"]
        restore_random_state(self._random)
        if with_data:
            engine.ledger.load_state_dict(rest["ledger"])
