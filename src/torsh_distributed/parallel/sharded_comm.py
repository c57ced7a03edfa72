"""The gathers and reductions of FSDP2, counted and timed through the slots it has for them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# Not exported by torch, but the argument types of the public set_custom_all_gather and set_custom_reduce_scatter.
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from typing_extensions import override

# torch 2.13 renames them and deprecates the old names. Drop with support for torch < 2.13.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class CommTally:
    """How often pieces travelled, and how long ranks waited for them. On a GPU the waiting is not seen here."""

    def __init__(self) -> None:
        self.num_gathers = 0
        self.num_reductions = 0
        self._waited_s = 0.0

    def add(self, started: float) -> None:
        """Note a wait that began at `started` and ends now."""
        self._waited_s += time.monotonic() - started

    def take_s(self) -> float:
        """Seconds waited since the last call."""
        taken, self._waited_s = self._waited_s, 0.0
        return taken


class _Empty:
    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class TalliedAllGather(_Empty, AllGather):
    """FSDP2's own all-gather, counted."""

    def __init__(self, tally: CommTally) -> None:
        self._tally = tally

    @override
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._tally.num_gathers += 1
        started = time.monotonic()
        work: dist.Work | None = _gather(output_tensor, input_tensor, group=group, async_op=async_op)
        self._tally.add(started)
        return work


class TalliedReduceScatter(_Empty, ReduceScatter):
    """FSDP2's own reduce-scatter, counted."""

    def __init__(self, tally: CommTally) -> None:
        self._tally = tally

    @override
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._tally.num_reductions += 1
        started = time.monotonic()
        work: dist.Work | None = _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        self._tally.add(started)
        return work
