"""Stage boundaries under sequence parallelism: stages send pieces of the sequence and restore them on arrival.

Each tensor-parallel rank sends its piece to its counterpart in the next stage: no gather, a fraction of the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from typing_extensions import override

from torsh_distributed.parallel.pipeline import StagePlan
from torsh_distributed.parallel.pipeline.runtime import Wrap


def sequence_edges(plan: StagePlan, mesh: DeviceMesh) -> Wrap:
    """Wraps a stage so activations enter and leave it as plain pieces of the sequence."""
    last = len(plan.stages) - 1

    def wrap(index: int, stage: nn.Module) -> nn.Module:
        arriving = plan.edges[index - 1] if index else ()
        leaving = plan.edges[index] if index < last else ()
        return _Edges(stage, mesh, arriving, leaving)

    return wrap


class _Edges(nn.Module):
    def __init__(self, stage: nn.Module, mesh: DeviceMesh, arriving: Sequence[bool], leaving: Sequence[bool]) -> None:
        super().__init__()
        self.stage = stage
        self._mesh, self._arriving, self._leaving = mesh, arriving, leaving

    @override
    def forward(self, *inputs: Any) -> Any:
        if self._arriving:
            flags = zip(inputs, self._arriving, strict=True)
            inputs = tuple(self._split(one) if is_activation else one for one, is_activation in flags)
        out = self.stage(*inputs)
        if not self._leaving:
            return out
        values = out if isinstance(out, tuple) else (out,)
        pieces = tuple(
            self._piece(one) if is_activation else one for one, is_activation in zip(values, self._leaving, strict=True)
        )
        return pieces if isinstance(out, tuple) else pieces[0]

    def _split(self, piece: Tensor) -> Tensor:
        return DTensor.from_local(piece, self._mesh, [Shard(1)], run_check=False) if _has_sequence(piece) else piece

    def _piece(self, value: Tensor) -> Tensor:
        if not _has_sequence(value):
            return value
        whole = value
        if not isinstance(whole, DTensor):
            whole = DTensor.from_local(value, self._mesh, [Replicate()], run_check=False)
        local: Tensor = whole.redistribute(placements=[Shard(1)]).to_local()
        return local


def _has_sequence(value: Tensor) -> bool:
    return value.is_floating_point() and value.dim() > 2
