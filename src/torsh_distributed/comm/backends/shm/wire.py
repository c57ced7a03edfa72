"""The wire of the shm backend: turns tensors into addresses and statuses into errors; the core does the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from typing_extensions import override

from torsh_distributed.comm.backends.handles import PendingWork
from torsh_distributed.comm.backends.shm.codes import DTYPES, FOLDS, OTHER_DTYPE, Status
from torsh_distributed.comm.backends.shm.core import Core, NativeCore
from torsh_distributed.comm.backends.shm.failures import ShmFailures
from torsh_distributed.comm.backends.shm.message_pump import MessagePump
from torsh_distributed.comm.backends.shm.segment import SharedSegment
from torsh_distributed.comm.backends.wire import BufferUse, Call, Folder, Rows, ScatterFolder, SharedBuffer, Wire
from torsh_distributed.comm.reduce_op import ReduceOp

_CLOSE_TIMEOUT_S = 5.0
_BUFFER_USES: dict[BufferUse, int] = {"shared": 0, "per_rank": 1}


class ShmWire(Wire):
    """Moves tensors through a segment of memory that all ranks of one node have mapped."""

    name: ClassVar[str] = "shm"
    takes_gpu: ClassVar[bool] = True
    shares_gpu_memory: ClassVar[bool] = True

    def __init__(self, core: Core, segment: SharedSegment, *, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self._core = core
        self._native = cast("NativeCore", core) if hasattr(core, "exchange_rows") else None
        self._segment = segment
        self._shared = WeakValueDictionary[int, SharedBuffer]()
        self._num_shared = 0
        self._has_torn = self._native is None
        self._failures = ShmFailures(core, rank)
        self._message_pump = MessagePump(core, self._failures)

    @override
    def supports(self, op: ReduceOp, dtype: torch.dtype) -> bool:
        return (op, dtype) in FOLDS

    @override
    def barrier(self, call: Call) -> None:
        status = self._core.barrier(call.timeout_ns, call.is_background)
        if status:
            self._failures.raise_for(status, call)

    @override
    def all_reduce(self, buffer: Tensor, op: ReduceOp, call: Call) -> None:
        dtype, reduction = FOLDS[op, buffer.dtype]
        status = self._core.all_reduce(
            buffer.data_ptr(), buffer.numel(), dtype, reduction, call.timeout_ns, call.is_background
        )
        if status:
            self._failures.raise_for(status, call)

    @override
    def folder(self, op: ReduceOp, dtype: torch.dtype) -> Folder:
        fold, raise_for = self._core.all_reduce, self._failures.raise_for
        dtype_code, reduction = FOLDS[op, dtype]

        def all_reduce(buffer: Tensor, call: Call) -> None:
            shared = self._shared.get(buffer.data_ptr()) if self._num_shared else None
            if shared is not None and shared.tensor.nbytes == buffer.nbytes:
                assert self._native is not None, "else nothing is shared"
                status = self._native.all_reduce_shared(
                    shared.addresses,
                    shared.number,
                    buffer.numel(),
                    dtype_code,
                    reduction,
                    call.timeout_ns,
                    call.is_background,
                )
            else:
                status = fold(
                    buffer.data_ptr(), buffer.numel(), dtype_code, reduction, call.timeout_ns, call.is_background
                )
            if status:
                self._has_torn = self._has_torn or self._native is None or not self._native.is_unbegun()
                raise_for(status, call)

        return all_reduce

    @property
    @override
    def fails_cleanly(self) -> bool:
        return not self._has_torn

    @override
    def reduce(self, buffer: Tensor, op: ReduceOp, root: int, call: Call) -> None:
        dtype, reduction = FOLDS[op, buffer.dtype]
        status = self._core.reduce(
            buffer.data_ptr(), buffer.numel(), dtype, reduction, root, call.timeout_ns, call.is_background
        )
        if status:
            self._failures.raise_for(status, call)

    @override
    def reduce_scatter(self, output: Tensor, sources: Sequence[Tensor], op: ReduceOp, call: Call) -> None:
        dtype, reduction = FOLDS[op, output.dtype]
        numels = tuple(source.numel() for source in sources)
        status = self._core.reduce_scatter(
            output.data_ptr(), _addresses(sources), numels, dtype, reduction, call.timeout_ns, call.is_background
        )
        if status:
            self._failures.raise_for(status, call)

    @override
    def broadcast(self, buffer: Tensor, root: int, call: Call) -> None:
        status = self._core.broadcast(
            buffer.data_ptr(), _size(buffer), _dtype(buffer), root, call.timeout_ns, call.is_background
        )
        if status:
            self._failures.raise_for(status, call)

    @override
    def all_gather(self, outputs: Sequence[Tensor], source: Tensor, call: Call) -> None:
        self._gather_to_all(_addresses(outputs), _sizes(outputs), source, call)

    @override
    def all_gather_flat(self, output: Tensor, source: Tensor, call: Call) -> None:
        size = source.nbytes
        self._gather_to_all(self._addresses_from(output, size), (size,) * self.num_ranks, source, call)

    def _gather_to_all(self, outs: tuple[int, ...], sizes: tuple[int, ...], source: Tensor, call: Call) -> None:
        status = self._core.all_gather(
            outs, sizes, source.data_ptr(), _dtype(source), call.timeout_ns, call.is_background
        )
        if status:
            self._failures.raise_for(status, call)

    @override
    def scatter_folder(self, op: ReduceOp, dtype: torch.dtype) -> ScatterFolder:
        fold, raise_for = self._core.reduce_scatter, self._failures.raise_for
        dtype_code, reduction = FOLDS[op, dtype]

        def reduce_scatter(output: Tensor, source: Tensor, call: Call) -> None:
            status = fold(
                output.data_ptr(),
                self._addresses_from(source, output.nbytes),
                (output.numel(),) * self.num_ranks,
                dtype_code,
                reduction,
                call.timeout_ns,
                call.is_background,
            )
            if status:
                raise_for(status, call)

        return reduce_scatter

    @override
    def all_to_all_flat(self, output: Tensor, source: Tensor, call: Call) -> None:
        size = source.nbytes // self.num_ranks
        sizes = (size,) * self.num_ranks
        outs, sources = self._addresses_from(output, size), self._addresses_from(source, size)
        self._exchange(outs, sizes, sources, sizes, _dtype(source), call)

    def _addresses_from(self, flat: Tensor, size: int) -> tuple[int, ...]:
        """The addresses of one part per rank, one after the other: less work than a tensor for each."""
        first = flat.data_ptr()
        return tuple(range(first, first + size * self.num_ranks, size))

    @override
    def gather(self, outputs: Sequence[Tensor] | None, source: Tensor, root: int, call: Call) -> None:
        status = self._core.gather(
            None if outputs is None else _addresses(outputs),
            source.data_ptr(),
            _size(source),
            _dtype(source),
            root,
            call.timeout_ns,
            call.is_background,
        )
        if status:
            self._failures.raise_for(status, call)

    @override
    def scatter(self, output: Tensor, sources: Sequence[Tensor] | None, root: int, call: Call) -> None:
        status = self._core.scatter(
            output.data_ptr(),
            None if sources is None else _addresses(sources),
            _size(output),
            _dtype(output),
            root,
            call.timeout_ns,
            call.is_background,
        )
        if status:
            self._failures.raise_for(status, call)

    @override
    def all_to_all(self, outputs: Sequence[Tensor], sources: Sequence[Tensor], call: Call) -> None:
        outs, given = (_addresses(outputs), _sizes(outputs)), (_addresses(sources), _sizes(sources))
        self._exchange(*outs, *given, _dtype(sources[0]), call)

    def _exchange(
        self,
        outs: tuple[int, ...],
        out_sizes: tuple[int, ...],
        sources: tuple[int, ...],
        source_sizes: tuple[int, ...],
        dtype: int,
        call: Call,
    ) -> None:
        status = self._core.all_to_all(
            outs, out_sizes, sources, source_sizes, dtype, call.timeout_ns, call.is_background
        )
        if status:
            self._failures.raise_for(status, call)

    @override
    def collective_buffer(self, numel: int, dtype: torch.dtype, use: BufferUse) -> Tensor | None:
        if self._native is None:
            return None
        memory = self._native.common(_BUFFER_USES[use], numel * dtype.itemsize)
        return None if memory is None else torch.frombuffer(memory, dtype=dtype)

    @property
    @override
    def takes_shared(self) -> bool:
        return self._native is not None

    @override
    def share(self, buffer: SharedBuffer) -> None:
        self._num_shared += 1
        buffer.number = self._num_shared
        self._shared[buffer.tensor.data_ptr()] = buffer

    @override
    def takes_rows(self, row_bytes: int, dtype: torch.dtype) -> bool:
        core = self._native
        return core is not None and dtype == torch.float32 and 0 < row_bytes <= core.max_row_bytes()

    @override
    def exchange_rows(self, output: Tensor, source: Tensor, rows: Rows, call: Call) -> None:
        assert self._native is not None, "asked for by takes_rows"
        status = self._native.exchange_rows(
            output.data_ptr(),
            len(output),
            source.data_ptr(),
            rows.row_numel * source.element_size(),
            0 if rows.sent is None else rows.sent.data_ptr(),
            rows.received is not None,
            0 if rows.received is None else rows.received.data_ptr(),
            0 if rows.weights is None else rows.weights.data_ptr(),
            tuple(rows.send),
            tuple(rows.receive),
            _dtype(source),
            call.timeout_ns,
            call.is_background,
        )
        if status:
            self._failures.raise_for(status, call)

    @override
    def send(self, buffer: Tensor, peer: int, tag: int, work: PendingWork, call: Call) -> None:
        self._message_pump.send(buffer, peer, tag, work, call)

    @override
    def receive(self, buffer: Tensor, peer: int | None, tag: int, work: PendingWork, call: Call) -> None:
        self._message_pump.receive(buffer, peer, tag, work, call)

    @override
    def help_with(self, work: PendingWork, timeout_s: float | None) -> None:
        self._message_pump.help_with(work, timeout_s)

    @override
    def abort(self, reason: str) -> None:
        self._core.poison(Status.ABORTED, self.rank, reason)

    @override
    def close(self) -> None:
        self._core.leave()
        self._message_pump.close(_CLOSE_TIMEOUT_S)
        self._segment.close()


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _dtype(tensor: Tensor) -> int:
    return DTYPES.get(tensor.dtype, OTHER_DTYPE)


def _addresses(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)


def _sizes(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(tensor.numel() * tensor.element_size() for tensor in tensors)
