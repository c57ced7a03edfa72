"""NamedBuffers: values kept for parameters by name, and used for several at once as one flat tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torsh_distributed.errors import TensorShapeMismatch


class FlatEntry(NamedTuple):
    """A parameter's part of a flat tensor."""

    name: str
    numel: int


FlatLayout = tuple[FlatEntry, ...]
"""Which parameters a flat tensor holds, in order."""


class NamedBuffers:
    """One fp32 tensor for each name, zero at first.

    Why by name: bucket layouts change after the first step, after a resume, and with the bucket size; values must
    follow their parameter. While a layout stays the same, its flat tensor is the storage itself: no copies.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, Tensor] = {}
        self._flats: dict[FlatLayout, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def has_any(self, names: Iterable[str]) -> bool:
        """Whether something is kept for one of the names."""
        return any(name in self._by_name for name in names)

    def flat(self, layout: FlatLayout, device: torch.device) -> Tensor:
        """The values for the names of a layout, as one tensor to change in place."""
        found = self._flats.get(layout)
        if found is None or found.device != device:
            found = self._lay_out(layout, device)
        return found

    def _lay_out(self, layout: FlatLayout, device: torch.device) -> Tensor:
        flat = torch.zeros(sum(entry.numel for entry in layout), device=device)
        for entry, part in zip(layout, split(flat, layout), strict=True):
            old = self._by_name.get(entry.name)
            if old is not None:
                if old.numel() != entry.numel:
                    raise TensorShapeMismatch(
                        f"{entry.name} has {entry.numel} elements, but {old.numel()} values are kept for it",
                        hint="the model changed: call reset_error_feedback(), or load the state of this model",
                    )
                part.copy_(old)
        self.drop(entry.name for entry in layout)
        self._flats[layout] = flat
        self._by_name.update(zip((entry.name for entry in layout), split(flat, layout), strict=True))
        return flat

    def drop(self, names: Iterable[str]) -> None:
        """Forget the values of these names; they are zero again."""
        gone = set(names) & self._by_name.keys()
        if not gone:
            return
        for layout in [layout for layout in self._flats if any(entry.name in gone for entry in layout)]:
            # The other names of that layout keep their values, as views of it, until their layout is made.
            del self._flats[layout]
        for name in gone:
            del self._by_name[name]

    def scale(self, factor: float) -> None:
        """Multiply all values."""
        for value in self._by_name.values():
            value.mul_(factor)

    def clear(self) -> None:
        """Forget everything."""
        self._by_name.clear()
        self._flats.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """A copy by name, on the CPU."""
        return {name: value.detach().cpu().clone() for name, value in self._by_name.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace everything with what `state_dict` returned."""
        self.clear()
        self._by_name = {name: value.detach().float().flatten().clone() for name, value in state.items()}


def split(flat: Tensor, layout: FlatLayout) -> Sequence[Tensor]:
    """The parts of a flat tensor, as views."""
    return torch.split(flat, [entry.numel for entry in layout])
