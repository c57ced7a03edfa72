"""Which part of a whole tensor a rank holds: rows, which are read as they are, or pieces, which are cut out."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torsh_distributed.parallel.state.whole_state import part_of

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
