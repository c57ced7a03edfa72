"""The collectives of tensors on a GPU that several ranks share: through its memory, or the host's for small ones.

Who waits for whom: ranks meet on the host, in the barrier of the group's own wire, and only after their stream has done
what the others will read. So no GPU ever waits for another process: what releases a blocked host releases everything,
when a rank dies or the group is aborted. A collective has ended on the GPU when it returns or its work completes, and
its outputs may be used on any stream.
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

    def after_caller(self, body: Body) -> Body:
        """`body` for any thread: its work on the GPU begins after all that the caller has queued so far, and is done
        when it returns."""
        queued = torch.cuda.current_stream(self._device).record_event()

        def run(call: Call) -> None:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                self._stream.wait_event(queued)
                try:
                    body(call)
                finally:
                    self._stream.synchronize()

        return run

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy in the host's memory, complete on return, of what the caller's stream will have made of the tensor."""
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copy.copy_(tensor.detach(), non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()
        return copy

    def incoming(self, tensor: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Memory of the host to receive into, and what then fills `tensor` from it, on any thread."""
        buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

        def fill(_: Call) -> None:
            _copy_all([tensor], [buffer])

        fill_in_order = self.after_caller(fill)
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
        self._stream.synchronize()
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
            views = [_view(slot, part) for slot in slots]
            views[self.rank].copy_(part)
            self._meet(call)
            if self.num_ranks == 2:
                _fold(part, views, op)
            else:
                self._fold_shares(part, views, op, call)
            self._meet(call)

    def _fold_shares(self, part: Tensor, views: list[Tensor], op: ReduceOp, call: Call) -> None:
        """Each rank folds its share of the elements, in its own memory, and all copy the shares of all."""
        shares = [view.tensor_split(self.num_ranks) for view in views]
        mine = [share[self.rank] for share in shares]
        folded = torch.empty_like(mine[0])
        _fold(folded, mine, op)
        mine[self.rank].copy_(folded)  # of this share, nobody else reads anything before they have met
        self._meet(call)
        for rank, target in enumerate(part.tensor_split(self.num_ranks)):
            target.copy_(shares[rank][rank])

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
            views = [_view(slot, part) for slot in slots]
            views[self.rank].copy_(part)
            self._meet(call)
            if self.rank == root:
                _fold(part, views, op)
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
            self._host.scatter(copy, None if sources is None else [self.to_host(one) for one in sources], root, call)
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
            self._host.reduce_scatter(copy, [self.to_host(source) for source in sources], op, call)
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
            self._host.all_to_all(copies, [self.to_host(source) for source in sources], call)
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
    """The parts of all ranks, in the order of ranks: everyone gets the same bits."""
    if target.dtype not in _WIDE:
        target.copy_(fold_all(parts, op))
        return
    target.copy_(parts[0])
    for part in parts[1:]:
        fold_into(target, part, op)
    finish_fold(target, op, len(parts))


def _empty_on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]


def _copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.detach().copy_(source, non_blocking=True)
