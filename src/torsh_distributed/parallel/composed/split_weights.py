"""Which pieces of stored weights a rank reads of a model that tensor or expert parallelism has split."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from typing_extensions import override

from torsh_distributed.parallel.expert.expert_weights import ExpertParts
from torsh_distributed.parallel.mesh.mesh import Mesh
from torsh_distributed.parallel.state.whole_state import plain_name
from torsh_distributed.parallel.tensor import param_cuts
from torsh_distributed.parallel.tensor.cut import bounds
from torsh_distributed.parallel.weights.held_parts import Rows


class SplitWeights(ExpertParts):
    """The pieces along `tp` and the experts along `ep`; construct it once the model is split."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        super().__init__(model)
        group = mesh.group("tp")
        self._rank, self._size = group.rank(), group.size()
        found = {} if self._size == 1 else param_cuts(model)
        self._cuts = {plain_name(name): cut for name, cut in found.items()}

    @override
    def runs(self, name: str, shape: Sequence[int]) -> Rows | None:
        cut = self._cuts.get(name)
        if cut is None:
            return super().runs(name, shape)
        if cut.dim != 0:
            return None
        found, begin = [], 0
        for length in cut.sections or (shape[0],):
            start, stop = bounds(length, rank=self._rank, size=self._size)
            found.append((begin + start, begin + stop))
            begin += length
        return found

    @override
    def piece(self, name: str, whole: Tensor) -> Tensor:
        cut = self._cuts.get(name)
        if cut is None:
            return super().piece(name, whole)
        return cut.part(whole, rank=self._rank, size=self._size)
