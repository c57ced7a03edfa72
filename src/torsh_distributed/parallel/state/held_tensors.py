"""What a rank holds of the model's tensors: boxes of whole tensors, in the model's own layout.

A checkpoint stores boxes under the names and shapes of the whole model, so what one plan saved loads under any other.
Nothing here communicates: a rank describes its own part.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_distributed.comm.collectives.objects import all_gather_object


def values_of_owners(mine: dict[str, dict[str, Any]], group: dist.ProcessGroup) -> dict[str, dict[str, Any]]:
    """Each parameter's values, sent by the first rank that has them; every rank of the group calls this."""
    described = {name: {key: _describe(value) for key, value in values.items()} for name, values in mine.items()}
    found: dict[str, dict[str, Any]] = {}
    for owner, theirs in enumerate(all_gather_object(described, group=group)):
        for name, kinds in theirs.items():
            if name not in found:
                held = mine[name] if owner == group.rank() else {}
                found[name] = {
                    key: sent_by(owner, held.get(key), group) if isinstance(kind, list) else kind
                    for key, kind in kinds.items()
                }
    return found


def sent_by(owner: int, value: Tensor | None, group: dist.ProcessGroup) -> Tensor:
    """The tensor of a rank of the group, on every rank of it."""
    if group.size() == 1:
        assert value is not None, "the only rank has everything"
        return value
    header = None if value is None else [list(value.shape), str(value.dtype).removeprefix("torch."), value.device.type]
    shape, dtype, device = all_gather_object(header, group=group)[owner]
    held = torch.empty(shape, dtype=getattr(torch, dtype), device=device) if value is None else value.contiguous()
    dist.broadcast(held, group=group, group_src=owner)
    return held


def _describe(value: Any) -> Any:
    return ["tensor"] if isinstance(value, Tensor) else value


class DimRun(NamedTuple):
    """Along one dim: `length` neighbouring indices, from `whole` in the whole tensor, from `local` in this rank's."""

    whole: int
    local: int
    length: int


class HeldBox(NamedTuple):
    """A box that is neighbouring in both: its first index in the whole tensor and in this rank's, and its sizes."""

    whole: tuple[int, ...]
    local: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def of(self, local: Tensor) -> Tensor:
        """This box of the rank's tensor: a view."""
        for dim, (start, size) in enumerate(zip(self.local, self.sizes, strict=True)):
            if size != local.shape[dim]:
                local = local.narrow(dim, start, size)
        return local

    def of_whole(self, whole: Tensor) -> Tensor:
        """This box of the whole tensor: a view."""
        for dim, (start, size) in enumerate(zip(self.whole, self.sizes, strict=True)):
            if size != whole.shape[dim]:
                whole = whole.narrow(dim, start, size)
        return whole


@dataclass(frozen=True)
class WholeLayout:
    """Which boxes of a whole tensor this rank holds."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    boxes: tuple[HeldBox, ...]
    local_shape: tuple[int, ...]
    """Of the tensor that this rank holds."""


@dataclass(frozen=True)
class HeldTensor:
    """A named tensor of which this rank holds a part."""

    name: str
    layout: WholeLayout
    dtype: torch.dtype
    read: Callable[[], Tensor]
    """This rank's part, of `layout.local_shape`: the memory itself where `write` is None, else perhaps a copy."""
    write: Callable[[Tensor], None] | None = None
    """Stores new values of this rank's part; None where filling the result of `read` does."""


def whole_runs(shape: Sequence[int]) -> list[list[DimRun]]:
    """The runs of a tensor that this rank holds whole."""
    return [[DimRun(0, 0, size)] for size in shape]


def within(runs: Sequence[DimRun], start: int, size: int) -> list[DimRun]:
    """The part of the runs that lies in local indices start..start+size, which become 0..size."""
    found = []
    for run in runs:
        low, high = max(run.local, start), min(run.local + run.length, start + size)
        if low < high:
            found.append(DimRun(run.whole + low - run.local, low - start, high - low))
    return found


def layout_of(shape: Sequence[int], runs: Sequence[Sequence[DimRun]], local_shape: Sequence[int]) -> WholeLayout:
    """The boxes of a tensor whose dims are covered by `runs`; one empty box if the whole tensor is empty."""
    if math.prod(shape) == 0:
        nothing = tuple(0 for _ in shape)
        box = HeldBox(nothing, nothing, tuple(shape))
        return WholeLayout(tuple(shape), (box,) if tuple(shape) == tuple(local_shape) else (), tuple(local_shape))
    boxes = tuple(
        HeldBox(tuple(run.whole for run in one), tuple(run.local for run in one), tuple(run.length for run in one))
        for one in itertools.product(*runs)
    )
    return WholeLayout(tuple(shape), boxes, tuple(local_shape))


@functools.lru_cache(maxsize=4096)
def whole_layout(shape: tuple[int, ...]) -> WholeLayout:
    """The layout of a tensor that this rank holds whole; kept, as those of shards are."""
    return layout_of(shape, whole_runs(shape), shape)


@functools.lru_cache(maxsize=4096)
def shard_layout(
    shape: tuple[int, ...],
    runs: tuple[tuple[DimRun, ...], ...],
    starts: tuple[int, ...],
    sizes: tuple[int, ...],
    local_shape: tuple[int, ...],
) -> WholeLayout:
    """The layout of a shard, from `starts` on and of `sizes`, of a piece whose dims are covered by `runs`.

    Kept: a state has many tensors of few shapes, and is described at every save.
    """
    cut = [within(one, start, size) for one, start, size in zip(runs, starts, sizes, strict=True)]
    return layout_of(shape, cut, local_shape)


def local_part_of(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: its shard, or all of it."""
    held: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return held.detach()


def shard_bounds(tensor: Tensor) -> tuple[Sequence[int], Sequence[int]]:
    """Where this rank's shard starts in a DTensor, and its sizes; the whole of any other tensor."""
    if not hasattr(tensor, "device_mesh"):
        return [0] * tensor.dim(), tensor.shape
    # Takes a second to import, which data-parallel jobs need not spend.
    from torsh_distributed.parallel.torch_internals import compute_local_shape_and_global_offset

    sizes, starts = compute_local_shape_and_global_offset(
        tensor.shape,
        tensor.device_mesh,
        tensor.placements,  # type: ignore[attr-defined]  # a DTensor's
    )
    return starts, sizes
