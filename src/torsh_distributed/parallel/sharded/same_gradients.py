"""Refuses a step in which ranks computed gradients of different parameters, before it changes anything.

FSDP2 reduces the gradients of a piece as one buffer of those that are there, and tells them apart by their places in
it. If a rank used other parameters than the rest (a head for each task, an expert without tokens, a layer left out) and
the sizes agree, gradients of different parameters are added without a word.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from torsh_distributed.comm.agreement import require_same
from torsh_distributed.comm.collectives.objects import device_of_numbers
from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.mesh.mesh_reduction import HostValue

_HINT = (
    "let every rank use the same parameters in a step, for example by adding 0 * parameter.sum() of the others to the "
    "loss, or train with mesh.dp, which adds gradients by parameter"
)
_MOST_NAMES = 8


class SameGradients:
    """Compares what the ranks of a group reduced, once in every step.

    What is compared is known to the host, so the answer is there before the update, whatever the GPU is doing. Only
    where the group takes nothing but tensors on a GPU (plain NCCL) it is read a step later.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._params: Mapping[str, nn.Parameter] = {}
        self._group = group
        self._device = device_of_numbers(group)
        self._reduced = 0
        self._last: HostValue | None = None

    def compare(self, params: Mapping[str, nn.Parameter]) -> None:
        """The parameters whose gradients all ranks have, or none."""
        self._params = params

    def note_reduction(self, piece: int) -> None:
        """The gradients of a piece are reduced."""
        self._reduced = hash((self._reduced, piece))

    def check(self) -> None:
        """Raise ConfigurationError on all ranks if they differ. Every rank calls it before its update."""
        if self._group.size() == 1:
            return
        # Of numbers alone, so it is the same in every process.
        digest = hash((self._reduced, tuple(param.grad is None for param in self._params.values())))
        self._reduced = 0
        is_late = self._device.type != "cpu"
        extremes = torch.tensor([digest, -digest], pin_memory=is_late).to(self._device, non_blocking=True)
        all_reduce(extremes, op="max", group=self._group)
        spread = HostValue(extremes.sum())
        asked, self._last = (self._last, spread) if is_late else (spread, None)
        if asked is not None and asked.wait() != 0:
            self._explain()

    def _explain(self) -> None:
        missing = [name for name, param in self._params.items() if param.grad is None]
        shown = [*missing[:_MOST_NAMES], *(["…"] if len(missing) > _MOST_NAMES else [])]
        require_same({"no gradient of": shown}, group=self._group, what="gradients of mesh.shard", hint=_HINT)
        # A step later, or in another order: what differed is not to be seen any more.
        raise ConfigurationError("ranks of mesh.shard added gradients of different parameters", hint=_HINT)
