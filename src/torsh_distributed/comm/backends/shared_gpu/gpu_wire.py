"""The collectives of tensors on a GPU that several ranks share: through its memory, or the host's for small ones.

Who waits for whom: ranks meet on the host, in the barrier of the group's own wire, and only after their stream has done
what the others will read. So no GPU ever waits for another process: what releases a blocked host releases everything,
when a rank dies or the group is aborted. When a collective returns, its outputs may be used on the caller's stream;
once a work is waited for, on any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from torsh_distributed.comm.backends.executor import Body
from torsh_distributed.comm.backends.handles import PendingWork
from torsh_distributed.comm.backends.shared_gpu.gpu_memory import SLOT_BYTES, GpuMemory, map_gpu_memory
from torsh_distributed.comm.backends.wire import Call, Wire
from torsh_distributed.comm.folding import finish_fold, fold_all, fold_into
from torsh_distributed.comm.reduce_op import ReduceOp

_ON_HOST_BYTES = 256 * 1024
"""Up to here the way through the host is the faster one: processes on one GPU take turns, and each turn costs more."""
_ALIGNMENT = 256
_WIDE = (torch.float32, torch.float64)


class InStreamOrder:
    """The body of a collective of tensors on a GPU.

    A caller that waits for it anyway runs it on its own stream: going to another one and back would take a turn of the
    GPU each, which processes that share it wait for.
    """

    def __init__(self, body: Body, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._body, self._device, self._stream = body, device, stream

    def __call__(self, call: Call) -> None:
        """On the caller's stream; what the host need not wait for is queued there when this returns."""
        if torch.cuda.current_device() == self._device.index:
            self._body(call)
            return
        with torch.cuda.device(self._device):
            self._body(call)

    def later(self) -> Body:
        """On a stream of its own, after all that is queued on the caller's now; done when it returns."""
        queued = torch.cuda.current_stream(self._device).record_event()

        def run(call: Call) -> None:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                self._stream.wait_event(queued)
                try:
                    self._body(call)
                finally:
                    self._stream.synchronize()

        return run


class GpuWire(Wire):
    """A group's wire for contiguous tensors on one GPU. `host` is its wire for tensors in the host's memory."""

    name: ClassVar[str] = "gpu"

    def __init__(self, host: Wire, device: torch.device) -> None:
        self.rank, self.num_ranks = host.rank, host.num_ranks
        self._host = host
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # untyped in torch
        self._memory: GpuMemory | None = None
        self._is_asked = not host.shares_gpu_memory

    def after_caller(self, body: Body) -> InStreamOrder:
        """`body` with its work on the GPU after all that the caller has queued so far."""
        return InStreamOrder(body, self._device, self._stream)

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy in the host's memory, complete on return, of what the caller's stream will have made of the tensor."""
        return self._all_to_host([tensor])[0]

    def _all_to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        copies = _empty_on_host(tensors)
        _copy_all(copies, tensors)
        torch.cuda.current_stream(self._device).synchronize()
        return copies

    def incoming(self, tensor: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Memory of the host to receive into, and what then fills `tensor` from it, on any thread."""
        buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

        def fill(_: Call) -> None:
            _copy_all([tensor], [buffer])

        fill_in_order = self.after_caller(fill).later()
        return buffer, lambda: fill_in_order(Call("recv", 1))

    # --- in the memory of the GPU -----------------------------------------------------------------------------

    def _slots(self, num_bytes: int, call: Call) -> list[Tensor] | None:
        """Everyone's memory for a collective of that size, the same on all ranks; None: it goes through the host."""
        if num_bytes <= _ON_HOST_BYTES:
            return None
        if not self._is_asked:
            self._is_asked = True
            self._memory = map_gpu_memory(self._host, self._device, call)
        return None if self._memory is None else self._memory.slots

    def _meet(self, call: Call) -> None:
        """Return when all ranks' work so far is in memory; nobody goes on before."""
        torch.cuda.current_stream(self._device).synchronize()
        self._host.barrier(call)

    @override
    def supports(self, op: ReduceOp, dtype: torch.dtype) -> bool:
        return self._host.supports(op, dtype)

    @override
    def barrier(self, call: Call) -> None:
        self._meet(call)

    @override
    def all_reduce(self, buffer: Tensor, op: ReduceOp, call: Call) -> None:
        slots = self._slots(buffer.nbytes, call)
        if slots is None:
            copy = self.to_host(buffer)
            self._host.all_reduce(copy, op, call)
            _copy_all([buffer], [copy])
            return
        for part in _parts(buffer, SLOT_BYTES):
            self._fold_at(0, part, slots, op, call)
            result = _view(slots[0], part)
            if self.rank == 0:
                result.copy_(part)
            self._meet(call)
            if self.rank != 0:
                part.copy_(result)
            self._meet(call)

    def _fold_at(self, root: int, part: Tensor, slots: list[Tensor], op: ReduceOp, call: Call) -> None:
        """One rank folds all parts into its own: sharing the work would take more turns on the GPU, which cost more."""
        views = [_view(slot, part) for slot in slots]
        if self.rank != root:
            views[self.rank].copy_(part)
        self._meet(call)
        if self.rank == root:
            views[root] = part
            _fold(part, views, op)

    @override
    def reduce(self, buffer: Tensor, op: ReduceOp, root: int, call: Call) -> None:
        slots = self._slots(buffer.nbytes, call)
        if slots is None:
            copy = self.to_host(buffer)
            self._host.reduce(copy, op, root, call)
            if self.rank == root:
                _copy_all([buffer], [copy])
            return
        for part in _parts(buffer, SLOT_BYTES):
            self._fold_at(root, part, slots, op, call)
            self._meet(call)

    @override
    def broadcast(self, buffer: Tensor, root: int, call: Call) -> None:
        slots = self._slots(buffer.nbytes, call)
        if slots is None:
            copy = self.to_host(buffer)
            self._host.broadcast(copy, root, call)
            _copy_all([buffer], [copy])
            return
        for part in _parts(_bytes(buffer), SLOT_BYTES):
            if self.rank == root:
                _view(slots[root], part).copy_(part)
            self._meet(call)
            if self.rank != root:
                part.copy_(_view(slots[root], part))
            self._meet(call)

    @override
    def all_gather(self, outputs: Sequence[Tensor], source: Tensor, call: Call) -> None:
        largest = max(output.nbytes for output in outputs)
        slots = self._slots(largest, call)
        if slots is None:
            copies = _empty_on_host(outputs)
            self._host.all_gather(copies, self.to_host(source), call)
            _copy_all(outputs, copies)
            return
        for start in range(0, largest, SLOT_BYTES):
            _into(slots[self.rank], _cut(source, start, SLOT_BYTES))
            self._meet(call)
            for rank, output in enumerate(outputs):
                _out_of(slots[rank], _cut(output, start, SLOT_BYTES))
            self._meet(call)

    @override
    def gather(self, outputs: Sequence[Tensor] | None, source: Tensor, root: int, call: Call) -> None:
        slots = self._slots(source.nbytes, call)
        if slots is None:
            copies = None if outputs is None else _empty_on_host(outputs)
            self._host.gather(copies, self.to_host(source), root, call)
            _copy_all(outputs or (), copies or ())
            return
        for start in range(0, source.nbytes, SLOT_BYTES):
            _into(slots[self.rank], _cut(source, start, SLOT_BYTES))
            self._meet(call)
            for rank, output in enumerate(outputs or ()):
                _out_of(slots[rank], _cut(output, start, SLOT_BYTES))
            self._meet(call)

    # --- a part of the memory for each rank -------------------------------------------------------------------

    @property
    def _share_bytes(self) -> int:
        """A rank's part of a slot, where the slot has something for each."""
        return SLOT_BYTES // self.num_ranks // _ALIGNMENT * _ALIGNMENT

    def _shares(self, slot: Tensor) -> tuple[Tensor, ...]:
        return torch.split(slot[: self._share_bytes * self.num_ranks], self._share_bytes)

    @override
    def scatter(self, output: Tensor, sources: Sequence[Tensor] | None, root: int, call: Call) -> None:
        slots = self._slots(output.nbytes, call)
        if slots is None:
            copy = torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
            self._host.scatter(copy, None if sources is None else self._all_to_host(sources), root, call)
            _copy_all([output], [copy])
            return
        shares = self._shares(slots[root])
        for start in range(0, output.nbytes, self._share_bytes):
            for rank, source in enumerate(sources or ()):
                _into(shares[rank], _cut(source, start, self._share_bytes))
            self._meet(call)
            _out_of(shares[self.rank], _cut(output, start, self._share_bytes))
            self._meet(call)

    @override
    def reduce_scatter(self, output: Tensor, sources: Sequence[Tensor], op: ReduceOp, call: Call) -> None:
        largest = max(source.nbytes for source in sources)
        slots = self._slots(largest, call)
        if slots is None:
            copy = torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
            self._host.reduce_scatter(copy, self._all_to_host(sources), op, call)
            _copy_all([output], [copy])
            return
        by_rank = [self._shares(slot) for slot in slots]
        for start in range(0, largest, self._share_bytes):
            for rank, source in enumerate(sources):
                _into(by_rank[self.rank][rank], _cut(source, start, self._share_bytes))
            self._meet(call)
            part = _cut(output, start, self._share_bytes)
            if len(part):
                target = part.view(output.dtype)
                _fold(target, [_view(shares[self.rank], target) for shares in by_rank], op)
            self._meet(call)

    @override
    def all_to_all(self, outputs: Sequence[Tensor], sources: Sequence[Tensor], call: Call) -> None:
        # Sizes differ from pair to pair: only together do ranks know how many rounds there are.
        largest = torch.tensor([max(source.nbytes for source in sources)])
        self._host.all_reduce(largest, ReduceOp.MAX, call)
        slots = self._slots(int(largest), call)
        if slots is None:
            copies = _empty_on_host(outputs)
            self._host.all_to_all(copies, self._all_to_host(sources), call)
            _copy_all(outputs, copies)
            return
        by_rank = [self._shares(slot) for slot in slots]
        for start in range(0, int(largest), self._share_bytes):
            for rank, source in enumerate(sources):
                _into(by_rank[self.rank][rank], _cut(source, start, self._share_bytes))
            self._meet(call)
            for rank, output in enumerate(outputs):
                _out_of(by_rank[rank][self.rank], _cut(output, start, self._share_bytes))
            self._meet(call)

    # --- messages and the end: of the host's wire -------------------------------------------------------------

    @override
    def send(self, buffer: Tensor, peer: int, tag: int, work: PendingWork, call: Call) -> None:
        raise AssertionError("messages travel through the host: see to_host")

    @override
    def receive(self, buffer: Tensor, peer: int | None, tag: int, work: PendingWork, call: Call) -> None:
        raise AssertionError("messages travel through the host: see incoming")

    @override
    def abort(self, reason: str) -> None:
        self._host.abort(reason)

    @override
    def close(self) -> None:
        """Leave the other ranks' memory and give back the own. No collective is running any more."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def _cut(tensor: Tensor, start: int, num_bytes: int) -> Tensor:
    """Some bytes of a contiguous tensor; fewer or none where it ends."""
    return _bytes(tensor)[start : start + num_bytes]


def _parts(tensor: Tensor, num_bytes: int) -> Iterator[Tensor]:
    yield from torch.split(tensor.detach().view(-1), num_bytes // tensor.element_size())


def _view(slot: Tensor, like: Tensor) -> Tensor:
    """The first bytes of a slot as a tensor like this one."""
    return slot[: like.nbytes].view(like.dtype)


def _into(slot: Tensor, part: Tensor) -> None:
    slot[: len(part)].copy_(part)


def _out_of(slot: Tensor, part: Tensor) -> None:
    part.copy_(slot[: len(part)])


def _fold(target: Tensor, parts: Sequence[Tensor], op: ReduceOp) -> None:
    """The parts of all ranks, in the order of ranks; the target may be one of them."""
    if target.dtype not in _WIDE or any(part is target for part in parts[1:]):
        target.copy_(fold_all(parts, op))
        return
    if parts[0] is not target:
        target.copy_(parts[0])
    for part in parts[1:]:
        fold_into(target, part, op)
    finish_fold(target, op, len(parts))


def _empty_on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]


def _copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.detach().copy_(source, non_blocking=True)
