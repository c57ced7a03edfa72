"""Which part of a stored tensor a rank holds: rows, which are read as they are, or pieces, which are cut out."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torsh_distributed.parallel.state.whole_state import part_of


class HeldParts:
    """Tensors that a rank holds whole or as shards (DTensors). A model with split layers overrides it."""

    def rows(self, name: str, shape: Sequence[int], held: Tensor) -> list[tuple[int, int]] | None:
        """Start and stop, along dim 0 of a whole tensor, of what this rank holds; None if that is not rows."""
        from torch.distributed.tensor import DTensor, Replicate, Shard  # takes a second to import

        num_rows = shape[0] if shape else 1
        cuts = [] if not isinstance(held, DTensor) else list(enumerate(held.placements))
        cuts = [(axis, one) for axis, one in cuts if not isinstance(one, Replicate)]
        if not cuts:
            return [(0, num_rows)]
        axis, cut = cuts[0]
        if len(cuts) > 1 or type(cut) is not Shard or cut.dim != 0:
            return None
        assert isinstance(held, DTensor)
        count = -(-num_rows // held.device_mesh.size(axis))
        start = min(held.device_mesh.get_local_rank(axis) * count, num_rows)
        return [(start, min(start + count, num_rows))]

    def part(self, name: str, whole: Tensor, held: Tensor) -> Tensor:
        """This rank's part of a whole tensor, in the form of `held`."""
        return part_of(whole, held)
