"""What each of our backends implements: a few operations on contiguous tensors in host memory.

`base.py` handles c10d's many names, options and kinds of tensor; a wire only moves bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar, Literal

import torch
from torch import Tensor

from torsh_distributed.comm.backends.handles import PendingWork
from torsh_distributed.comm.reduce_op import ReduceOp

# c10d's value for "no timeout given": the group's own then applies.
UNSET_TIMEOUT = timedelta(milliseconds=-1)


class Call:
    """One operation: its name and number for errors, and how to wait.

    Why a plain class with slots: every collective creates one, and a small collective takes microseconds.
    """

    __slots__ = ("is_background", "operation", "peer", "sequence", "sources", "tag", "timeout_ns")

    def __init__(self, operation: str, timeout_ns: int, sequence: int = 0) -> None:
        self.operation = operation
        self.timeout_ns = timeout_ns
        self.sequence = sequence
        # Set by the group's own thread, which must not spin while the caller computes.
        self.is_background = False
        # For profiles alone: what goes in where that is another tensor than what comes out, and who a message is for.
        self.sources: Sequence[Tensor] | None = None
        self.peer: int | None = None
        self.tag: int | None = None


BufferUse = Literal["shared", "per_rank"]
"""Which memory `collective_buffer` gives: `shared` is the same for all ranks, for the output of an all_gather whose
source is a part of it; with `per_rank` each has its own, for the source of a reduce_scatter or for `exchange_rows`."""

Folder = Callable[[Tensor, Call], None]
"""An all-reduce for a fixed reduction and dtype."""

ScatterFolder = Callable[[Tensor, Tensor, Call], None]
"""A reduce-scatter for a fixed reduction and dtype: the output, and the sources for all ranks in one tensor."""


@dataclass(eq=False)
class SharedBuffer:
    """A tensor of this rank that all ranks of the group have mapped, as this rank has theirs of the same size.

    It stays shared as long as this object lives.
    """

    tensor: Tensor
    addresses: tuple[int, ...]
    """The address of each rank's tensor in this process."""

    memory: tuple[object, ...]
    """Keeps the mappings of the other ranks' memory alive."""

    number: int = 0
    """Identifies this buffer; the same on all ranks."""


@dataclass(frozen=True)
class Rows:
    """Which rows of a tensor go to which rank, and where received rows belong. Indices are int64, contiguous."""

    send: Sequence[int]
    """Rows for each rank."""

    receive: Sequence[int]
    """Rows from each rank."""

    row_numel: int

    sent: Tensor | None = None
    """(sum of send,): the source row of each row sent, rank after rank; None: all in order."""

    received: Tensor | None = None
    """(sum of receive,): the output row that each received row is added to; None: stored in order of arrival."""

    weights: Tensor | None = None
    """(sum of receive,) float32: the factor of each received row in the sum; None: 1."""


class Wire(ABC):
    """Moves tensors between the ranks of one group.

    Every tensor is dense, contiguous and in host memory; dtypes and sizes were checked on this rank. Collectives
    are called by one thread at a time, in the same order on every rank, and return when this rank's part is done; a
    call that cannot be completed raises and ends the group: afterwards only `abort` and `close` are called.
    Ranks are those of the group. `send` and `receive` may be called by any thread at any time.
    """

    name: ClassVar[str]
    """The backend's name, as in `init_process_group(name)`."""

    takes_gpu: ClassVar[bool] = False
    """Whether a group of this wire takes tensors on a GPU too (`shared_gpu`): by copies, or in the GPU's memory."""

    shares_gpu_memory: ClassVar[bool] = False
    """Whether all ranks are on one node, so that those on one GPU may map each other's memory there."""

    rank: int
    num_ranks: int

    @abstractmethod
    def supports(self, op: ReduceOp, dtype: torch.dtype) -> bool:
        """Whether the wire does this reduction itself; for others the group gathers and folds with torch."""

    @abstractmethod
    def barrier(self, call: Call) -> None:
        """Return when every rank has called it."""

    @abstractmethod
    def all_reduce(self, buffer: Tensor, op: ReduceOp, call: Call) -> None:
        """Fold `buffer` over all ranks, in place, with the same bits on every rank."""

    def folder(self, op: ReduceOp, dtype: torch.dtype) -> Folder:
        """`all_reduce` for one reduction and dtype that it `supports`, with all lookups done once."""
        return lambda buffer, call: self.all_reduce(buffer, op, call)

    @property
    def fails_cleanly(self) -> bool:
        """Whether each all-reduce of a `folder` that failed so far left its tensor as it was; False if unknown."""
        return False

    @abstractmethod
    def reduce(self, buffer: Tensor, op: ReduceOp, root: int, call: Call) -> None:
        """Fold `buffer` over all ranks into the root's, in place; the others keep theirs."""

    @abstractmethod
    def broadcast(self, buffer: Tensor, root: int, call: Call) -> None:
        """Make every rank's `buffer` equal to the root's."""

    @abstractmethod
    def all_gather(self, outputs: Sequence[Tensor], source: Tensor, call: Call) -> None:
        """Fill outputs[r] with the source of rank r; sizes may differ from rank to rank."""

    @abstractmethod
    def gather(self, outputs: Sequence[Tensor] | None, source: Tensor, root: int, call: Call) -> None:
        """Fill the root's outputs[r] with the source of rank r; `outputs` is None elsewhere."""

    @abstractmethod
    def scatter(self, output: Tensor, sources: Sequence[Tensor] | None, root: int, call: Call) -> None:
        """Fill `output` with the root's sources[this rank]; `sources` is None elsewhere."""

    @abstractmethod
    def reduce_scatter(self, output: Tensor, sources: Sequence[Tensor], op: ReduceOp, call: Call) -> None:
        """Fill `output` with the fold of every rank's sources[this rank]; sizes may differ from rank to rank."""

    def all_gather_flat(self, output: Tensor, source: Tensor, call: Call) -> None:
        """`all_gather` of equal sizes into one tensor, one after the other; neither is empty."""
        self.all_gather(torch.split(output.detach().view(-1), source.numel()), source.detach(), call)

    def scatter_folder(self, op: ReduceOp, dtype: torch.dtype) -> ScatterFolder:
        """`reduce_scatter` of equal sizes out of one tensor, for a pair that the wire supports; not of empty ones."""

        def reduce_scatter(output: Tensor, source: Tensor, call: Call) -> None:
            self.reduce_scatter(output.detach(), torch.split(source.detach().view(-1), output.numel()), op, call)

        return reduce_scatter

    @abstractmethod
    def all_to_all(self, outputs: Sequence[Tensor], sources: Sequence[Tensor], call: Call) -> None:
        """Fill outputs[r] with rank r's sources[this rank]; sizes may differ from pair to pair."""

    def all_to_all_flat(self, output: Tensor, source: Tensor, call: Call) -> None:
        """`all_to_all` of equal parts, each side's in one tensor; neither is empty."""
        numel = source.numel() // self.num_ranks
        outputs, sources = (torch.split(tensor.detach().view(-1), numel) for tensor in (output, source))
        self.all_to_all(outputs, sources, call)

    def collective_buffer(self, numel: int, dtype: torch.dtype, use: BufferUse) -> Tensor | None:
        """A tensor in the group's shared memory for the next call of that kind; None if there is none now.

        Every rank asks in the same order, for `shared` also for the same size. It is reused once nothing refers to it.
        """
        return None

    @property
    def takes_shared(self) -> bool:
        """Whether `share` is supported; the same on every rank."""
        return False

    def share(self, buffer: SharedBuffer) -> None:
        """Let an all-reduce of this buffer read and write those of all ranks, which share buffers in the same order."""
        raise AssertionError(f"{self.name} takes no shared buffers: check takes_shared")

    def takes_rows(self, row_bytes: int, dtype: torch.dtype) -> bool:
        """Whether `exchange_rows` supports such rows; the same on every rank."""
        return False

    def exchange_rows(self, output: Tensor, source: Tensor, rows: Rows, call: Call) -> None:
        """All-to-all of rows, gathered when sent and added up when received; check `takes_rows` first."""
        raise AssertionError(f"{self.name} takes no rows: check takes_rows")

    @abstractmethod
    def send(self, buffer: Tensor, peer: int, tag: int, work: PendingWork, call: Call) -> None:
        """Start sending; `work` is completed when `buffer` may be changed again."""

    @abstractmethod
    def receive(self, buffer: Tensor, peer: int | None, tag: int, work: PendingWork, call: Call) -> None:
        """Start receiving, from any rank if `peer` is None; `work` is completed when `buffer` is filled."""

    def help_with(self, work: PendingWork, timeout_s: float | None) -> None:
        """Called while waiting for a send or receive: move messages until it is complete, or just sleep."""
        work.wait_for_completion(timeout_s)

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Release every call that is blocked on this group, on this rank within 50 ms; from any thread."""

    @abstractmethod
    def close(self) -> None:
        """Release memory, files and threads. No call is running any more, or it was aborted."""
