"""How the state of an optimizer is saved and loaded whose parameters' state is whole, on the ranks that own them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from torsh_distributed.comm.collectives.objects import all_gather_object
from torsh_distributed.parallel.state.held_tensors import DimRun, WholeLayout, whole_layout, whole_runs
from torsh_distributed.parallel.state.owner_values import values_of_owners
from torsh_distributed.parallel.state.whole_state import StateParts
from torsh_distributed.parallel.whole_tensors.owner_update import OwnerUpdate


class OwnedState(StateParts):
    """The parts of an optimizer's state where owners keep that of some parameters; for the rest, those of `inner`."""

    def __init__(self, inner: StateParts, update: OwnerUpdate) -> None:
        self._inner = inner
        self._update = update
        self._names = update.spread_names

    @override
    def first_name(self, name: str) -> str:
        return self._inner.first_name(name)

    @override
    def keeps(self, param: Tensor) -> bool:
        return self._update.owns(param)

    @override
    def check(self, name: str, param: Tensor, optimizer: Optimizer) -> None:
        if name not in self._names:
            self._inner.check(name, param, optimizer)

    @override
    def joined(self, name: str, value: Tensor) -> Tensor:
        return value.detach() if name in self._names else self._inner.joined(name, value)

    @override
    def part(self, name: str, value: Tensor, like: Tensor) -> Tensor:
        return value if name in self._names else self._inner.part(name, value, like)

    @override
    def runs(self, name: str, shape: Sequence[int]) -> tuple[list[int], list[list[DimRun]]]:
        return (list(shape), whole_runs(shape)) if name in self._names else self._inner.runs(name, shape)

    @override
    def like(self, param: Tensor) -> Tensor:
        shape = self._update.whole_shape(param)
        return self._inner.like(param) if shape is None else torch.empty(shape, dtype=param.dtype, device="meta")

    @override
    def layout(self, name: str, value: Tensor) -> WholeLayout:
        return whole_layout(tuple(value.shape)) if name in self._names else self._inner.layout(name, value)

    @override
    def fits(self, mine: list[list[str]], saved: list[list[str]]) -> bool:
        return self._inner.fits(mine, saved)

    @override
    def all_groups(self, mine: list[list[str]]) -> list[list[str]]:
        return self._inner.all_groups(mine)

    @override
    def all_values(self, mine: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        owned = {name: values for name, values in mine.items() if name in self._names}
        return self._inner.all_values({**mine, **values_of_owners(owned, self._update.group)})

    @override
    def all_plain(self, mine: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for theirs in all_gather_object(mine, group=self._update.group):
            found = {**theirs, **found}
        return self._inner.all_plain(found)
