"""Numbers kept for parameters by name, and handed out for several at once as one flat tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torsh_distributed.errors import TensorShapeMismatch


class Piece(NamedTuple):
    """A parameter's part of a flat tensor."""

    name: str
    numel: int


Layout = tuple[Piece, ...]
"""Who lies where in a flat tensor, in order."""


class NamedBuffers:
    """One fp32 tensor for each name, zero at first.

    Why by name: buckets are laid out anew after the first step, after a resume, and when their size changes; what
    belongs to a parameter must follow it. As long as a layout stays, its flat tensor is the storage itself: no copies.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, Tensor] = {}
        self._flats: dict[Layout, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def has_any(self, names: Iterable[str]) -> bool:
        """Whether something is kept for one of the names."""
        return any(name in self._by_name for name in names)

    def flat(self, layout: Layout, device: torch.device) -> Tensor:
        """What is kept for the names of a layout, as one tensor to be changed in place."""
        found = self._flats.get(layout)
        if found is None or found.device != device:
            found = self._lay_out(layout, device)
        return found

    def _lay_out(self, layout: Layout, device: torch.device) -> Tensor:
        flat = torch.zeros(sum(piece.numel for piece in layout), device=device)
        for piece, part in zip(layout, split(flat, layout), strict=True):
            old = self._by_name.get(piece.name)
            if old is not None:
                if old.numel() != piece.numel:
                    raise TensorShapeMismatch(
                        f"{piece.name} has {piece.numel} elements, but what is kept for it has {old.numel()}",
                        hint="the model changed: call reset_error_feedback(), or load state of this model",
                    )
                part.copy_(old)
        self.drop(piece.name for piece in layout)
        self._flats[layout] = flat
        self._by_name.update(zip((piece.name for piece in layout), split(flat, layout), strict=True))
        return flat

    def drop(self, names: Iterable[str]) -> None:
        """Forget what is kept for the names; for them it is zero again."""
        gone = set(names) & self._by_name.keys()
        if not gone:
            return
        for layout in [layout for layout in self._flats if any(piece.name in gone for piece in layout)]:
            # The others of that layout keep their parts, as views of it, until they are laid out anew.
            del self._flats[layout]
        for name in gone:
            del self._by_name[name]

    def scale(self, factor: float) -> None:
        """Multiply everything kept."""
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
        """Keep what `state_dict` gave, and nothing else."""
        self.clear()
        self._by_name = {name: value.detach().float().flatten().clone() for name, value in state.items()}


def split(flat: Tensor, layout: Layout) -> Sequence[Tensor]:
    """The parts of a flat tensor, as views."""
    return torch.split(flat, [piece.numel for piece in layout])
