"""The gathers and reductions of FSDP2, counted and timed through its custom-communication slots."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# Not exported by torch, but the argument types of the public set_custom_all_gather and set_custom_reduce_scatter.
from typing_extensions import override

from torsh_distributed import events
from torsh_distributed.comm.shared_memory.buffers import collective_buffer
from torsh_distributed.errors import InternalError
from torsh_distributed.parallel.torch_internals import AllGather, ReduceScatter

# torch 2.13 renames them and deprecates the old names. Drop with support for torch < 2.13.
gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


_CPU = torch.device("cpu")


class CommTally:
    """Counts gathers and reductions, and the seconds spent waiting for them; on a GPU waits are not visible here."""

    def __init__(self) -> None:
        self.num_gathers = 0
        self.num_reductions = 0
        self.wire_bytes = 0
        """Bytes of gradients this rank sent; counted only under compression."""
        self.step = 0
        self._waited_s = 0.0

    def add_reduction(
        self, started: float, *, num_bytes: int, codec: str | None = None, wire_bytes: int | None = None
    ) -> None:
        """Count the reduction of a piece's gradients."""
        index, self.num_reductions = self.num_reductions, self.num_reductions + 1
        self.wire_bytes += wire_bytes or 0
        self.add(started)
        if events.wanted(events.BucketEvent):
            duration_s = time.monotonic() - started
            events.emit(
                events.BucketEvent(
                    step=self.step,
                    index=index,
                    num_bytes=num_bytes,
                    duration_s=duration_s,
                    codec=codec,
                    wire_bytes=wire_bytes,
                )
            )

    def add(self, started: float) -> None:
        """Add a wait that began at `started` and ends now."""
        self._waited_s += time.monotonic() - started

    def take_s(self) -> float:
        """Seconds waited since the last call."""
        taken, self._waited_s = self._waited_s, 0.0
        self.step += 1
        return taken


class PlainBuffers:
    """Allocates buffers as FSDP2 does by default."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer for a piece."""
        return torch.empty(*size, dtype=dtype, device=device)


class TalliedAllGather(PlainBuffers, AllGather):
    """FSDP2's own all-gather, counted; with ranks on one CPU node, into memory they share, without a copy."""

    def __init__(self, tally: CommTally, group: dist.ProcessGroup, note: Callable[[], None]) -> None:
        """`note` is called when the shards have been read."""
        self._tally = tally
        self._group = group
        self._note = note

    @override
    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        shared = collective_buffer(math.prod(map(int, size)), dtype, self._group, "shared") if device == _CPU else None
        return super().allocate(size, dtype=dtype, device=device) if shared is None else shared

    @override
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._note()
        self._tally.num_gathers += 1
        started = time.monotonic()
        work: dist.Work | None = gather(output_tensor, input_tensor, group=group, async_op=async_op)
        self._tally.add(started)
        return work


class TalliedReduceScatter(PlainBuffers, ReduceScatter):
    """FSDP2's own reduce-scatter, counted; with ranks on one CPU node, from memory they share.

    FSDP2 allocates the source, then the output, which becomes the gradient and is kept. It does not say which is which:
    the output is the allocation after a source that has a rank's share of its elements. A source without an output is
    what a backward that failed left behind.
    """

    def __init__(self, tally: CommTally, group: dist.ProcessGroup, note: Callable[[], None]) -> None:
        """`note` is called before each reduction."""
        self._tally = tally
        self._group = group
        self._note = note
        self._source: weakref.ref[Tensor] | None = None
        self._output: weakref.ref[Tensor] | None = None

    @override
    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        numel, num_ranks = math.prod(map(int, size)), self._group.size()
        source = self._source() if self._source is not None and self._output is None else None
        if source is not None and numel * num_ranks == source.numel():
            output = super().allocate(size, dtype=dtype, device=device)
            self._output = weakref.ref(output)
            return output
        shared = None
        if num_ranks > 1 and device == _CPU:
            shared = collective_buffer(numel, dtype, self._group, "per_rank")
        source = super().allocate(size, dtype=dtype, device=device) if shared is None else shared
        self._source, self._output = weakref.ref(source), None
        return source

    @override
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._check(output_tensor, input_tensor, group)
        self._source = self._output = None
        self._note()
        started = time.monotonic()
        work: dist.Work | None = reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        self._tally.add_reduction(started, num_bytes=input_tensor.nbytes)
        return work

    def _check(self, output: Tensor, source: Tensor, group: dist.ProcessGroup) -> None:
        """Raise if a buffer is used for the other one's purpose: the gradient would lie in memory that ranks share."""
        allocated = [None if one is None else one() for one in (self._source, self._output)]
        if allocated[0] is source and allocated[1] is output and output.numel() * group.size() == source.numel():
            return
        raise InternalError(
            "FSDP2 allocates the buffers of a reduce-scatter in another way than torsh-distributed knows",
            hint="use a torch of 2.11 to 2.13, or report this with the version of torch",
            operation="reduce_scatter",
            torch=torch.__version__,
            source_numel=source.numel(),
            output_numel=output.numel(),
            allocated_numel=[None if one is None else one.numel() for one in allocated],
            num_ranks=group.size(),
        )
