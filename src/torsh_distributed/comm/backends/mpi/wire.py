"""The wire of the mpi4py backend: non-blocking calls of MPI on the tensors' own memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from torsh_distributed.comm.backends.handles import PendingWork
from torsh_distributed.comm.backends.mpi.control import ControlChannel
from torsh_distributed.comm.backends.mpi.datatypes import MAX_COUNT, SUPPORTED
from torsh_distributed.comm.backends.mpi.failures import MpiFailures
from torsh_distributed.comm.backends.mpi.library import MpiLibrary
from torsh_distributed.comm.backends.mpi.transfers import Transfers
from torsh_distributed.comm.backends.mpi.waiting import RequestWaiter
from torsh_distributed.comm.backends.wire import Call, Wire
from torsh_distributed.comm.reduce_op import ReduceOp

if TYPE_CHECKING:
    from mpi4py import MPI

_CHUNK_NUMEL = 2**24
"""Elements reduced by one call. Far below MPI's limit, because a single poll may fold a whole chunk and cannot be
aborted meanwhile. An all-reduce of 128 MB is not slower."""
_NUM_RESERVED_TAGS = 2


class MpiWire(Wire):
    """Moves tensors with MPI, over a communicator of the group's own. Group rank and communicator rank are the same.

    Choices between calls of MPI depend on what all ranks know (sizes, op, dtype), never on where a tensor lies.
    """

    name: ClassVar[str] = "mpi4py"

    def __init__(self, library: MpiLibrary, comm: MPI.Intracomm, *, group_id: str, timeout_s: float) -> None:
        self.rank = comm.Get_rank()
        self.num_ranks = comm.Get_size()
        self._library = library
        self._comm = comm
        self._in_place = library.mpi.IN_PLACE
        self._datatypes = library.datatypes
        self._exchange_tag = library.max_tag - 1
        self._num_collectives = 0
        self._failures = MpiFailures(library.mpi, self.rank)
        self._control = ControlChannel(library, comm, tag=library.max_tag, group_id=group_id)
        self._waits = RequestWaiter(library, self._control, self._failures)
        self._transfers = Transfers(
            library, comm, self._datatypes, self._control, self._failures, max_tag=library.max_tag - _NUM_RESERVED_TAGS
        )
        self._is_closed = False
        library.register(self, timeout_s)

    @override
    def supports(self, op: ReduceOp, dtype: torch.dtype) -> bool:
        return (op, dtype) in SUPPORTED

    def _begin(self, call: Call) -> None:
        """Count a collective; raises if it is known that it cannot complete."""
        self._num_collectives += 1
        self._waits.check(call, self._num_collectives)

    # --- reductions -------------------------------------------------------------------------------------------

    @override
    def all_reduce(self, buffer: Tensor, op: ReduceOp, call: Call) -> None:
        self._begin(call)
        mpi_op = self._datatypes.op(op, buffer.dtype)
        for chunk in _chunks(buffer):
            numbers = self._datatypes.numbers(chunk)
            self._run(partial(self._comm.Iallreduce, self._in_place, numbers, mpi_op), call, (chunk,))
        self._finish_mean(buffer, op)

    @override
    def reduce(self, buffer: Tensor, op: ReduceOp, root: int, call: Call) -> None:
        self._begin(call)
        self._reduce(buffer, op, root, call)
        if self.rank == root:
            self._finish_mean(buffer, op)

    def _reduce(self, buffer: Tensor, op: ReduceOp, root: int, call: Call) -> None:
        mpi_op = self._datatypes.op(op, buffer.dtype)
        for chunk in _chunks(buffer):
            numbers = self._datatypes.numbers(chunk)
            if self.rank == root:
                start = partial(self._comm.Ireduce, self._in_place, numbers, mpi_op, root)
            else:
                start = partial(self._comm.Ireduce, numbers, None, mpi_op, root)
            self._run(start, call, (chunk,))

    @override
    def reduce_scatter(self, output: Tensor, sources: Sequence[Tensor], op: ReduceOp, call: Call) -> None:
        self._begin(call)
        counts = [source.numel() for source in sources]
        if sum(counts) <= MAX_COUNT:
            whole = _as_one(sources)
            if whole is None:
                whole = torch.cat([source.detach().view(-1) for source in sources])
            start = partial(
                self._comm.Ireduce_scatter,
                self._datatypes.numbers(whole),
                self._datatypes.numbers(output),
                counts,
                self._datatypes.op(op, output.dtype),
            )
            self._run(start, call, (whole, output))
        else:
            self._reduce_one_by_one(output, sources, op, call)
        self._finish_mean(output, op)

    def _reduce_one_by_one(self, output: Tensor, sources: Sequence[Tensor], op: ReduceOp, call: Call) -> None:
        """A reduction to each rank in turn, in chunks: the sources must not change, so the root's is copied."""
        for root, source in enumerate(sources):
            if root != self.rank:
                self._reduce(source, op, root, call)
                continue
            _copy(output, source)
            self._reduce(output, op, root, call)

    def _finish_mean(self, buffer: Tensor, op: ReduceOp) -> None:
        if op is ReduceOp.MEAN:
            with torch.inference_mode():
                buffer.detach().div_(self.num_ranks)

    # --- copies -----------------------------------------------------------------------------------------------

    @override
    def barrier(self, call: Call) -> None:
        self._begin(call)
        self._run(self._comm.Ibarrier, call, ())

    @override
    def broadcast(self, buffer: Tensor, root: int, call: Call) -> None:
        self._begin(call)
        self._run(partial(self._comm.Ibcast, self._datatypes.raw(buffer), root), call, (buffer,))

    @override
    def all_gather(self, outputs: Sequence[Tensor], source: Tensor, call: Call) -> None:
        self._begin(call)
        _copy(outputs[self.rank], source)
        sizes = {_size(output) for output in outputs}
        if len(sizes) > 1:
            others = [rank for rank in range(self.num_ranks) if rank != self.rank]
            self._exchange({rank: outputs[rank] for rank in others}, dict.fromkeys(others, source), call)
            return
        [size] = sizes
        whole = _as_one(outputs)
        if whole is not None:
            self._all_gather_single(whole, size, call)
            return
        whole = torch.empty(self.num_ranks, outputs[0].numel(), dtype=source.dtype)
        _copy(whole[self.rank], source)
        self._all_gather_single(whole, size, call)
        for output, part in zip(outputs, whole, strict=True):
            _copy(output, part)

    def _all_gather_single(self, whole: Tensor, size: int, call: Call) -> None:
        """This rank's part is already in place."""
        parts = self._datatypes.raw_at(whole.data_ptr(), size, times=self.num_ranks)
        self._run(partial(self._comm.Iallgather, self._in_place, parts), call, (whole,))

    @override
    def gather(self, outputs: Sequence[Tensor] | None, source: Tensor, root: int, call: Call) -> None:
        self._begin(call)
        if outputs is None:
            self._exchange({}, {root: source}, call)
            return
        _copy(outputs[root], source)
        self._exchange({rank: output for rank, output in enumerate(outputs) if rank != root}, {}, call)

    @override
    def scatter(self, output: Tensor, sources: Sequence[Tensor] | None, root: int, call: Call) -> None:
        self._begin(call)
        if sources is None:
            self._exchange({root: output}, {}, call)
            return
        _copy(output, sources[root])
        self._exchange({}, {rank: source for rank, source in enumerate(sources) if rank != root}, call)

    @override
    def all_to_all(self, outputs: Sequence[Tensor], sources: Sequence[Tensor], call: Call) -> None:
        self._begin(call)
        _copy(outputs[self.rank], sources[self.rank])
        self._exchange(
            {rank: output for rank, output in enumerate(outputs) if rank != self.rank},
            {rank: source for rank, source in enumerate(sources) if rank != self.rank},
            call,
        )

    def _exchange(self, outputs: dict[int, Tensor], sources: dict[int, Tensor], call: Call) -> None:
        """Receive from and send to the ranks named, all at once; every size is checked on arrival.

        Why not MPI's own collectives for these: they need all sizes on every rank, take tensors from one block of
        memory only, and do not report when two ranks disagree on a size.
        """
        tag, raw = self._exchange_tag, self._datatypes.raw
        kept = (*outputs.values(), *sources.values())
        status = self._library.mpi.Status()
        started: list[MPI.Request] = []
        try:
            for rank, output in outputs.items():
                started.append(self._comm.Irecv(raw(output), rank, tag))
            for rank, source in sources.items():
                started.append(self._comm.Isend(raw(source), rank, tag))
            for request, (rank, output) in zip(started, outputs.items(), strict=False):  # receives come first
                self._waits.until_done(request, call, self._num_collectives, kept, status)
                received = status.Get_elements(self._library.mpi.BYTE)
                if received != _size(output):
                    raise self._failures.other_size(call, rank, received, _size(output))
            for request in started[len(outputs) :]:
                self._waits.until_done(request, call, self._num_collectives, kept)
        except BaseException as error:
            self._library.abandon(started, kept)
            if isinstance(error, self._library.mpi.Exception):
                raise self._failures.of_mpi(error, call) from error
            raise

    def _run(self, start: Callable[[], MPI.Request], call: Call, kept: Sequence[Tensor]) -> None:
        self._waits.run(start, call, self._num_collectives, kept)

    # --- point-to-point ---------------------------------------------------------------------------------------

    @override
    def send(self, buffer: Tensor, peer: int, tag: int, work: PendingWork, call: Call) -> None:
        self._transfers.send(buffer, peer, tag, work, call)

    @override
    def receive(self, buffer: Tensor, peer: int | None, tag: int, work: PendingWork, call: Call) -> None:
        self._transfers.receive(buffer, peer, tag, work, call)

    @override
    def help_with(self, work: PendingWork, timeout_s: float | None) -> None:
        self._transfers.help_with(work, timeout_s)

    # --- the end ----------------------------------------------------------------------------------------------

    @override
    def abort(self, reason: str) -> None:
        # Waiting threads sleep on the control channel's event and find the reason there.
        self._control.abort(reason)

    @override
    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if not self._library.is_usable:
            self._control.released.set()
            return
        has_ended = self._control.ending is not None
        if not has_ended:
            self._control.leave(self._num_collectives)
        self._transfers.close()
        if self._control.close() and not has_ended:
            # Freeing is local here; after an abort an abandoned request may still use the communicator.
            self._comm.Free()


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _chunks(buffer: Tensor) -> Sequence[Tensor]:
    if buffer.numel() <= _CHUNK_NUMEL:
        return (buffer,)
    return torch.split(buffer.detach().view(-1), _CHUNK_NUMEL)


def _copy(output: Tensor, source: Tensor) -> None:
    if output.data_ptr() != source.data_ptr():
        with torch.inference_mode():
            output.detach().view(-1).copy_(source.detach().view(-1))


def _as_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """The tensors as one if they follow each other in one block of memory."""
    first = tensors[0].detach()
    address = first.data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != address:
            return None
        address += _size(tensor)
    storage = first.untyped_storage()
    if address > storage.data_ptr() + storage.nbytes():
        return None
    return first.as_strided((sum(tensor.numel() for tensor in tensors),), (1,), first.storage_offset())
