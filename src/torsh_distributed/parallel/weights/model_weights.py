"""Where the values of a model on the meta device come from: the interface for strategies that split it first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from torsh_distributed.comm.shared_memory.memory_file import MemoryFile
from torsh_distributed.parallel.local_tensors import local_of
from torsh_distributed.parallel.state.whole_state import part_of, plain_name

Rows = list[tuple[int, int]]
"""Start and stop along dim 0 of a whole tensor, of one run after the other."""


class HeldParts:
    """Tensors that a rank holds whole or as shards (DTensors). A model with split layers overrides `runs` and `piece`:
    what they give may be sharded further."""

    def rows(self, name: str, shape: Sequence[int], held: Tensor) -> Rows | None:
        """The rows of a whole tensor that this rank holds; None if that is not rows."""
        runs = self.runs(name, shape)
        return None if runs is None else _shard_of(runs, held)

    def part(self, name: str, whole: Tensor, held: Tensor) -> Tensor:
        """This rank's part of a whole tensor, in the form of `held`."""
        return part_of(self.piece(name, whole), held)

    def runs(self, name: str, shape: Sequence[int]) -> Rows | None:
        """The rows of this rank's piece, before it is sharded; None if a piece is not rows."""
        return [(0, shape[0] if shape else 1)]

    def piece(self, name: str, whole: Tensor) -> Tensor:
        """This rank's piece, before it is sharded."""
        return whole


def _shard_of(runs: Rows, held: Tensor) -> Rows | None:
    """The rows of a rank's shard of a piece that consists of these rows."""
    from torch.distributed.tensor import DTensor, Replicate, Shard  # takes a second to import

    if not isinstance(held, DTensor):
        return runs
    cuts = [(axis, one) for axis, one in enumerate(held.placements) if not isinstance(one, Replicate)]
    if not cuts:
        return runs
    axis, cut = cuts[0]
    if len(cuts) > 1 or type(cut) is not Shard or cut.dim != 0:
        return None
    num_rows = sum(stop - start for start, stop in runs)
    count = -(-num_rows // held.device_mesh.size(axis))
    first = min(held.device_mesh.get_local_rank(axis) * count, num_rows)
    return _between(runs, first, min(first + count, num_rows))


def _between(runs: Rows, first: int, last: int) -> Rows:
    """The rows from `first` to `last` of those in `runs`, counted through them."""
    found, begin = [], 0
    for start, stop in runs:
        inside = (start + max(first - begin, 0), min(stop, start + last - begin))
        if inside[0] < inside[1]:
            found.append(inside)
        begin += stop - start
    return found


class ModelWeights(ABC):
    """The values of a model's parameters and buffers, for what a rank holds of it once it is split."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def allocate(self, module: nn.Module, names: Collection[str] | None = None) -> None:
        """Give memory, not values, to the tensors of `module` that have none: those in `names`, by default all.

        Shared parameters stay shared, and sharded ones (DTensors) stay the same objects.
        """
        from torch.distributed.tensor import DTensor  # takes a second to import

        made: dict[Tensor, nn.Parameter] = {}
        for path, inner in module.named_modules(remove_duplicate=False):
            for name, param in list(inner._parameters.items()):
                full = plain_name(f"{path}.{name}" if path else name)
                if param is None or not param.is_meta or isinstance(param, DTensor):
                    continue
                if names is not None and full not in names:
                    continue
                if param not in made:
                    made[param] = nn.Parameter(torch.empty_like(param, device=self.device), param.requires_grad)
                    made[param].__dict__.update(param.__dict__)  # how tensor parallelism cut it, for one
                inner._parameters[name] = made[param]
            for name, buffer in list(inner._buffers.items()):
                full = plain_name(f"{path}.{name}" if path else name)
                if buffer is not None and buffer.is_meta and (names is None or full in names):
                    inner._buffers[name] = torch.empty_like(buffer, device=self.device)
        if any(param.is_meta and isinstance(param, DTensor) for param in module.parameters()):
            module._apply(lambda one: torch.empty_like(one, device=self.device) if one.is_meta else one)  # type: ignore[no-untyped-call]  # untyped in torch

    @abstractmethod
    def load(
        self,
        module: nn.Module,
        parts: HeldParts | None = None,
        *,
        names: Collection[str] | None = None,
        memory: MemoryFile | None = None,
    ) -> None:
        """Fill this rank's parts of `module`'s tensors; every rank of the world calls this.

        A rank may have nothing to fill (`names` empty). Tensors in `memory` may be written through its file. If any
        rank fails, every rank raises.
        """


def copy_part(parts: HeldParts, name: str, whole: Tensor, held: Tensor) -> None:
    """Copy this rank's part of a whole tensor into `held`."""
    local_of(held.detach()).copy_(local_of(parts.part(name, whole, held)))
