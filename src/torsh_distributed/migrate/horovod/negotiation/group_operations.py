"""Carries out agreed operations on the group of a process set, on the engine's thread.

Adasum adds gradients so that parallel ones count once and orthogonal ones in full.
Of two vectors a and b it is (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b; of more ranks, pairs of pairs. Every rank
gathers all vectors and folds them in the same order, so all get the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_distributed.comm.backends.wire import SharedBuffer
from torsh_distributed.comm.collectives.moves import all_gather_single, all_to_all_single, broadcast
from torsh_distributed.comm.collectives.reductions import all_reduce, reduce_scatter_single
from torsh_distributed.comm.reduce_op import ReduceOp
from torsh_distributed.comm.shared_memory.buffers import share_buffer
from torsh_distributed.migrate.horovod.negotiation.answers.agreed_answers import PackedStep, ReusedBuffer
from torsh_distributed.migrate.horovod.negotiation.answers.request_table import ReadyOp
from torsh_distributed.migrate.horovod.negotiation.request import OpKind, PendingOp, Request, RequestFlags
from torsh_distributed.parallel.torch_internals import _flatten_dense_tensors, _foreach_copy_, _unflatten_dense_tensors


def adasum(vectors: list[Tensor]) -> Tensor:
    """Fold vectors of one shape; their number is a power of two. Products are taken in float64."""
    while len(vectors) > 1:
        half = len(vectors) // 2
        # Neighbours first, as in recursive doubling: (0, 1), (2, 3), …
        vectors = [_pair(vectors[2 * index], vectors[2 * index + 1]) for index in range(half)]
    return vectors[0]


def _pair(first: Tensor, second: Tensor) -> Tensor:
    a, b = first.double().flatten(), second.double().flatten()
    dot, norm_a, norm_b = torch.dot(a, b), torch.dot(a, a), torch.dot(b, b)
    # A zero vector adds nothing, and the other one then counts in full.
    share_a = torch.where(norm_a > 0, 1 - dot / (2 * norm_a.clamp(min=torch.finfo(torch.float64).tiny)), 1.0)
    share_b = torch.where(norm_b > 0, 1 - dot / (2 * norm_b.clamp(min=torch.finfo(torch.float64).tiny)), 1.0)
    return (share_a * a + share_b * b).to(first.dtype).view_as(first)


_FOLDS = {"Sum": ReduceOp.SUM, "Min": ReduceOp.MIN, "Max": ReduceOp.MAX, "Product": ReduceOp.PRODUCT}
_BOOL_FOLDS = {"Sum": ReduceOp.MAX, "Max": ReduceOp.MAX, "Min": ReduceOp.MIN, "Product": ReduceOp.MIN}
_WORTH_SHARING_BYTES = 256 * 1024
_KEPT_TOGETHER_BYTES = 1 << 20
"""Results up to this size may stay views of the buffer they were packed in; larger ones would keep it alive."""


class GroupOperations:
    """The operations of one process set. `ranks`: its members as ranks of the torch world, in order."""

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        self._group = group
        self._ranks = list(ranks)
        self._size = group.size()
        self._me = group.rank()
        self._shared: dict[str, SharedBuffer | None] = {}
        self._stream: torch.cuda.Stream | None = None

    def run(self, step: PackedStep, ops: Sequence[PendingOp | None]) -> None:
        """Carry out operations that were packed together; `ops` are this rank's, None where it has joined."""
        request = step[0].request
        with self._device_order(request, ops) as device:
            match request.kind:
                case OpKind.ALLREDUCE:
                    self._all_reduce(step, ops, device)
                case OpKind.ADASUM:
                    self._adasum(_own(ops))
                case OpKind.AVERAGED:
                    op = _own(ops)
                    assert op.run is not None, "it brings its code"
                    op.result, op.wire_bytes = op.run(self._group)
                case OpKind.ALLGATHER:
                    self._all_gather(_own(ops), step[0].sizes)
                case OpKind.BROADCAST:
                    self._broadcast(_own(ops))
                case OpKind.ALLTOALL:
                    self._all_to_all(_own(ops), step[0].sizes)
                case OpKind.REDUCESCATTER:
                    self._reduce_scatter(_own(ops))
                case OpKind.JOIN:
                    _own(ops).result = self._ranks[step[0].sizes[0][0]]
                case _:  # a barrier or a process set: that all ranks agreed is all there is
                    pass

    @contextmanager
    def _device_order(self, request: Request, ops: Sequence[PendingOp | None]) -> Iterator[torch.device]:
        """On a GPU: run on a stream of our own, after what the callers' streams had queued when they submitted."""
        if request.device != "cuda":
            yield torch.device("cpu")
            return
        device = next((op.inputs[0].device for op in ops if op is not None and op.inputs), torch.device("cuda"))
        with torch.cuda.device(device):
            if self._stream is None:
                self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # untyped in torch
            with torch.cuda.stream(self._stream):
                for op in ops:
                    if op is None or op.device_ready is None:
                        continue
                    op.device_ready.wait()
                    for tensor in op.inputs:
                        tensor.record_stream(self._stream)
                yield device
                for op in ops:
                    if op is not None:
                        op.device_done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped in torch
                        op.device_done.record()

    # --- reductions -------------------------------------------------------------------------------------------

    def _all_reduce(self, step: PackedStep, ops: Sequence[PendingOp | None], device: torch.device) -> None:
        request = step[0].request
        if len(step) == 1 and len(request.tensors) == 1:
            self._all_reduce_one(step[0], ops[0], device)
            return
        if step.is_repeated and device.type == "cpu" and self._all_reduce_in_place(step, ops, request):
            return
        if step[0].joined:
            sources = [
                tensor
                for ready, op in zip(step, ops, strict=True)
                for tensor in (ready.request.zeros(device) if op is None else op.inputs)
            ]
        else:
            sources = [tensor for op in ops if op is not None for tensor in op.inputs]
        if len(step) == 1:  # a group; steps of several have one dtype
            kinds = dict.fromkeys(tensor.dtype for tensor in sources)
            if len(kinds) > 1:
                self._all_reduce_mixed(sources, list(kinds), ops[0], request)
                return
        flat = self._fold(_flatten_dense_tensors(sources), request)  # type: ignore[no-untyped-call]  # untyped in torch
        parts = _unflatten_dense_tensors(flat, sources)  # type: ignore[no-untyped-call]  # untyped in torch
        start = 0
        targets: list[Tensor] = []
        results: list[Tensor] = []
        is_small = flat.nbytes <= _KEPT_TOGETHER_BYTES
        for ready, op in zip(step, ops, strict=True):
            end = start + len(ready.request.tensors)
            if op is None:
                pass
            elif op.outputs is None:
                own = parts[start:end]
                op.result = list(own) if is_small else [part.clone() for part in own]
            else:
                targets += op.outputs
                results += parts[start:end]
                op.result = op.outputs
            start = end
        if targets:
            _foreach_copy_(targets, results)

    def _all_reduce_in_place(self, step: PackedStep, ops: Sequence[PendingOp | None], request: Request) -> bool:
        """Small tensors of a repeated step, all in place, through a buffer that stays; False for any other step."""
        tensors: list[Tensor] = []
        for op in ops:
            if op is None or op.outputs is not op.inputs:
                return False
            tensors += op.inputs
        buffer = step.buffer
        if buffer is None:
            if sum(tensor.nbytes for tensor in tensors) > _KEPT_TOGETHER_BYTES:
                return False
            buffer = step.buffer = ReusedBuffer(tensors)
        buffer.pack(tensors)
        folded = self._fold(buffer.values, request)
        if folded is not buffer.values:
            buffer.values.copy_(folded)
        buffer.unpack(tensors)
        for op in ops:
            assert op is not None, "looked at above"
            op.result = op.outputs
        return True

    def _all_reduce_mixed(
        self, sources: Sequence[Tensor], kinds: Sequence[torch.dtype], op: PendingOp | None, request: Request
    ) -> None:
        """One request with tensors of several dtypes: one buffer for each."""
        parts: list[Tensor] = list(sources)
        for dtype in kinds:
            places = [index for index, tensor in enumerate(sources) if tensor.dtype == dtype]
            alike = [sources[place] for place in places]
            flat = self._fold(_flatten_dense_tensors(alike), request)  # type: ignore[no-untyped-call]  # untyped in torch
            pieces = _unflatten_dense_tensors(flat, alike)  # type: ignore[no-untyped-call]  # untyped in torch
            for place, piece in zip(places, pieces, strict=True):
                parts[place] = piece
        if op is None:
            return
        if op.outputs is None:
            op.result = [part.clone() for part in parts]
            return
        for target, part in zip(op.outputs, parts, strict=True):
            target.copy_(part)
        op.result = op.outputs

    def _all_reduce_one(self, ready: ReadyOp, op: PendingOp | None, device: torch.device) -> None:
        request = ready.request
        if op is None:
            self._fold(request.zeros(device)[0], request)
            return
        source = op.inputs[0].detach()
        if op.outputs is None:
            op.result = [self._fold(source.clone(memory_format=torch.contiguous_format), request)]
            return
        target = op.outputs[0].detach()
        if target.data_ptr() != source.data_ptr():
            target.copy_(source)
        if request.flags & RequestFlags.SHARED:
            self._fold_shared(request, target, is_whole=not ready.joined)
        else:
            folded = self._fold(target, request)
            if folded is not target:
                target.copy_(folded)
        op.result = op.outputs

    def _fold_shared(self, request: Request, target: Tensor, *, is_whole: bool) -> None:
        """Reduce a buffer that is used at every step in memory that the ranks share, if they can.

        The ranks share it at the first step in which nobody has joined. A rank that has joined brings another buffer:
        then the others reduce a copy, because the wire must not find the shared one.
        """
        if is_whole and request.name not in self._shared:
            is_worth_it = request.device == "cpu" and target.nbytes >= _WORTH_SHARING_BYTES
            self._shared[request.name] = share_buffer(target, self._group) if is_worth_it else None
        if is_whole or self._shared.get(request.name) is None:
            folded = self._fold(target, request)
        else:
            folded = self._fold(target.clone(), request)
        if folded is not target:
            target.copy_(folded)

    def _fold(self, flat: Tensor, request: Request) -> Tensor:
        """prescale, reduce over the ranks, postscale, in place; a mean is a sum divided by all ranks, joined or not."""
        if flat.dtype == torch.bool:
            return all_reduce(flat.to(torch.uint8), _BOOL_FOLDS[request.op], group=self._group).to(torch.bool)
        scale(flat, request.prescale)
        if request.op != "Average":
            all_reduce(flat, _FOLDS[request.op], group=self._group)
            scale(flat, request.postscale)
        elif flat.dtype.is_floating_point and request.postscale == 1.0 and self._size & (self._size - 1) == 0:
            # Halving is exact, so the backend may divide in the same pass.
            all_reduce(flat, ReduceOp.MEAN, group=self._group)
        else:
            all_reduce(flat, ReduceOp.SUM, group=self._group)
            scale(flat, request.postscale / self._size)
        return flat

    def _adasum(self, op: PendingOp) -> None:
        results = []
        for index, tensor in enumerate(op.inputs):
            flat = tensor.detach().reshape(-1).contiguous()
            everyone = list(all_gather_single(flat, group=self._group).view(self._size, -1)) if flat.numel() else [flat]
            folded = adasum(everyone).view(tensor.shape) if flat.numel() else flat.view(tensor.shape)
            scale(folded, op.request.postscale)
            if op.outputs is not None:
                op.outputs[index].copy_(folded)
            results.append(folded)
        op.result = results if op.outputs is None else op.outputs

    def _reduce_scatter(self, op: PendingOp) -> None:
        """Dim 0 is split over the ranks; if it does not divide, the first ranks get one row more."""
        results = []
        for tensor in op.inputs:
            source = tensor.detach()
            counts = rows_by_rank(source.shape[0], self._size)
            padded = source.new_zeros((self._size, counts[0], *source.shape[1:]))
            for rank, rows in enumerate(torch.split(source, counts)):
                padded[rank, : len(rows)] = rows
            scale(padded, op.request.prescale)
            part = padded[0]
            if padded.numel():
                part = reduce_scatter_single(padded.flatten(0, 1), ReduceOp.SUM, group=self._group)
            divisor = self._size if op.request.op == "Average" else 1
            scale(part, op.request.postscale / divisor)
            results.append(part[: counts[self._me]].clone() if counts[self._me] < counts[0] else part)
        op.result = results

    # --- copies: whatever the dtype, bytes travel -------------------------------------------------------------

    def _broadcast(self, op: PendingOp) -> None:
        root = op.request.root
        results = []
        for index, tensor in enumerate(op.inputs):
            target = tensor.detach() if op.outputs is not None else tensor.detach().clone()
            if op.outputs is not None and op.outputs[index].data_ptr() != tensor.data_ptr():
                target = op.outputs[index].detach().copy_(tensor)
            if target.numel():
                broadcast(as_bytes(target), root, group=self._group)
            results.append(target)
        op.result = results if op.outputs is None else op.outputs

    def _all_gather(self, op: PendingOp, sizes: Sequence[Sequence[int]]) -> None:
        op.result = [
            self._gather_rows(tensor.detach(), [rows[index] for rows in sizes])
            for index, tensor in enumerate(op.inputs)
        ]

    def _gather_rows(self, tensor: Tensor, counts: Sequence[int]) -> Tensor:
        longest, row_shape = max(counts), tensor.shape[1:]
        result_shape = (sum(counts), *row_shape)
        if longest == 0 or 0 in row_shape:
            return tensor.new_empty(result_shape)
        padded = tensor
        if tensor.shape[0] < longest:
            padded = tensor.new_zeros((longest, *row_shape))
            padded[: tensor.shape[0]] = tensor
        gathered = all_gather_single(as_bytes(padded), group=self._group).view(tensor.dtype)
        blocks = gathered.view(self._size, longest, *row_shape)
        if min(counts) == longest:
            return blocks.view(result_shape)
        return torch.cat([block[:count] for block, count in zip(blocks, counts, strict=True)])

    def _all_to_all(self, op: PendingOp, splits: Sequence[Sequence[int]]) -> None:
        """`splits[sender][receiver]` rows; the result is what was received, and from whom."""
        source = op.inputs[0].detach()
        sent = list(splits[self._me])
        received = [rows[self._me] for rows in splits]
        row_bytes = source[:1].numel() * source.element_size() if len(source) else 0
        if not row_bytes:
            row_bytes = source.element_size()
            for size in source.shape[1:]:
                row_bytes *= size
        shape = (sum(received), *source.shape[1:])
        if row_bytes == 0:
            op.result = [source.new_empty(shape), torch.tensor(received, dtype=torch.int32)]
            return
        rows = as_bytes(source[: sum(sent)].contiguous())
        output = all_to_all_single(
            rows, [count * row_bytes for count in sent], [count * row_bytes for count in received], group=self._group
        )
        counts = torch.tensor(received, dtype=torch.int32, device=source.device)
        op.result = [output.view(source.dtype).view(shape), counts]


def _own(ops: Sequence[PendingOp | None]) -> PendingOp:
    op = ops[0]
    assert op is not None, "an operation that a joined rank cannot take part in has been refused"
    return op


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory as bytes: every backend moves those, whatever the dtype."""
    return tensor.reshape(-1).view(torch.uint8)


def rows_by_rank(num_rows: int, num_ranks: int) -> list[int]:
    """How rows are split over ranks: the first get one more if they do not divide."""
    share, rest = divmod(num_rows, num_ranks)
    return [share + (rank < rest) for rank in range(num_ranks)]


def scale(tensor: Tensor, factor: float) -> None:
    """Multiply in place: floats in their own precision (half ones in float32), integers in float64, then cut."""
    if factor == 1.0:
        return
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.mul_(factor)
    else:
        tensor.copy_((tensor.double() * factor).to(tensor.dtype))
