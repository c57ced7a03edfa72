"""Which pieces of stored weights a rank reads of a model that tensor or expert parallelism has split."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from torsh_distributed.parallel.expert.expert_weights import ExpertParts
from torsh_distributed.parallel.mesh.mesh import Mesh
from torsh_distributed.parallel.state.whole_state import part_of, plain_name
from torsh_distributed.parallel.tensor import param_cuts
from torsh_distributed.parallel.tensor.cut import bounds


class SplitWeights(ExpertParts):
    """The pieces along `tp` and the experts along `ep`; construct it once the model is split."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        super().__init__(model)
        group = mesh.group("tp")
        self._rank, self._size = group.rank(), group.size()
        found = {} if self._size == 1 else param_cuts(model)
        self._cuts = {plain_name(name): cut for name, cut in found.items()}

    @override
    def rows(self, name: str, shape: Sequence[int], held: Tensor) -> list[tuple[int, int]] | None:
        cut = self._cuts.get(name)
        if cut is None:
            return super().rows(name, shape, held)
        if cut.dim != 0 or isinstance(held, DTensor):
            return None
        found, begin = [], 0
        for length in cut.sections or (shape[0],):
            start, stop = bounds(length, rank=self._rank, size=self._size)
            found.append((begin + start, begin + stop))
            begin += length
        return found

    @override
    def part(self, name: str, whole: Tensor, held: Tensor) -> Tensor:
        cut = self._cuts.get(name)
        return part_of(whole if cut is None else cut.part(whole, rank=self._rank, size=self._size), held)
