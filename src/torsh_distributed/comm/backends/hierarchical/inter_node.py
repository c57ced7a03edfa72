"""A gloo group between nodes, with the deadlines and errors of our backends."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_distributed import events
from torsh_distributed.comm.backends.capabilities import gloo_reductions
from torsh_distributed.comm.backends.gloo import new_connections, patient_threads
from torsh_distributed.comm.backends.handles import PendingWork
from torsh_distributed.comm.backends.wire import Call
from torsh_distributed.comm.folding import fold_into
from torsh_distributed.comm.meeting.network_interface import gloo_address
from torsh_distributed.comm.reduce_op import ReduceOp
from torsh_distributed.errors import CommunicationError, OperationTimeout, TensorShapeMismatch, TorshError, first_line

_NUM_TIMED = 3  # all-reduces; the first ones also pay for new memory and for TCP's slow start
_SLOW_BYTES_PER_S = 130e6
"""Of one connection. Below this, packing saves more on the link than it costs; decision 0013 has the figures."""
_LEAST_BYTES = 64 * 1024  # smaller messages are latency


class Packing:
    """One end of a connection between two nodes; packs its messages if the link is slow.

    Why measured: a backend does not know how fast a link is, and on a fast one packing costs more than it saves. Both
    ends must reach the same decision, so they exchange their measurements once.
    """

    def __init__(self, native: Any | None) -> None:
        """`native`: the compiled core, without which nothing is packed. Any: see `load_native`."""
        self._native: Any = native
        self._num_left = _NUM_TIMED
        self._bytes_per_s = 0.0
        self._is_on = False

    def packs(self, buffer: Tensor) -> bool:
        """Whether this buffer is sent packed; the same at both ends."""
        return self._is_on and buffer.dtype is torch.float32 and buffer.nbytes >= _LEAST_BYTES

    def timed(self, num_bytes: int, spent_s: float) -> bool:
        """Record a large all-reduce. True once, after the same one at both ends: then they `agree`."""
        if not self._num_left:
            return False
        self._num_left -= 1
        self._bytes_per_s = max(self._bytes_per_s, num_bytes / spent_s)
        return self._num_left == 0

    def seen(self) -> Tensor:
        """What this end sends to the other: its best rate and the version of its compiled core."""
        version = 0 if self._native is None else self._native.VERSION
        return torch.tensor([self._bytes_per_s, version], dtype=torch.float64)

    def agree(self, theirs: Tensor) -> None:
        """Decide from the measurements of both ends.

        The better rate counts: the end that arrived first has also timed its wait for the other.
        """
        (rate, version), (their_rate, their_version) = self.seen().tolist(), theirs.tolist()
        rate = max(rate, their_rate)
        self._is_on = rate < _SLOW_BYTES_PER_S and 0 < version == their_version
        reason = f"the best rate measured was {rate / 1e6:.0f} MB/s"
        if version != their_version or not version:
            reason += ", and the two nodes do not have the same compiled core"
        events.emit(
            events.DecisionEvent(subject="packing between nodes", choice="on" if self._is_on else "off", reason=reason)
        )

    def pack(self, buffer: Tensor) -> Tensor:
        """The packed message of a buffer that it `packs`; `unpack` restores the same floats."""
        message = self.room_for(buffer)
        return message[: self._native.pack(buffer.data_ptr(), buffer.numel(), message.data_ptr())]

    def room_for(self, buffer: Tensor) -> Tensor:
        """Memory for the largest message with as many floats; the one received may be shorter."""
        return torch.empty(self._native.packed_room(buffer.numel()), dtype=torch.uint8)

    def unpack(self, message: Tensor, like: Tensor, call: Call) -> Tensor:
        """The floats of a message; raises if their number differs from that of `like`."""
        values = torch.empty_like(like)
        if not self._native.unpack(message.data_ptr(), values.numel(), values.data_ptr()):
            raise TensorShapeMismatch(
                f"{call.operation} number {call.sequence} has another size on the other node",
                hint="every rank must call it with a tensor of the same size",
                operation=call.operation,
                sequence=call.sequence,
                backend="torsh",
            )
        return values


_making = threading.Lock()


_SWAP_TAG = 0  # of the group's own messages; users' messages go over another gloo group


class PendingAllReduce(NamedTuple):
    """An all-reduce under way between nodes."""

    works: tuple[dist.Work, ...]
    buffer: Tensor
    theirs: Tensor | None
    """The values of the other of two nodes, once received; None where gloo folds."""
    op: ReduceOp
    is_packed: bool = False
    """Whether `theirs` is a packed message instead of values."""


def _gloo_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """torch's gloo on the interface that reaches the other nodes. Any: torch's stubs do not declare its methods."""
    address = gloo_address(os.environ)
    if address is None:
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's stubs
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return dist.ProcessGroupGloo(store, rank, size, options)


class InterNodeGroup:
    """gloo between `ranks` of a group; ranks and roots in the calls below are indices into `ranks`."""

    def __init__(
        self, store: dist.Store, ranks: Sequence[int], rank: int, timeout: timedelta, native: Any | None = None
    ) -> None:
        """`native`: the compiled core, if messages may be packed. Any: see `load_native`."""
        self.ranks = tuple(ranks)
        self.index = self.ranks.index(rank)
        self._packing = Packing(native) if len(self.ranks) == 2 else None
        self._reason: str | None = None
        # Any: torch's stubs do not declare the methods of this class.
        # One at a time in a process: connections that come up meanwhile are counted as this group's.
        with _making, patient_threads(), new_connections() as self._connections:
            self._group: Any = _gloo_group(store, self.index, len(self.ranks), timeout)

    def supports(self, op: ReduceOp, dtype: torch.dtype) -> bool:
        """Whether gloo can fold these."""
        return (op, dtype) in gloo_reductions()

    def start_all_reduce(self, buffer: Tensor, op: ReduceOp, call: Call, *, is_alone: bool) -> PendingAllReduce:
        """Start folding `buffer` over the group, in place; `finish` waits for it. `is_alone`: no other one is pending.

        Alone, two nodes swap their values and each folds them: as many bytes as gloo's algorithm (each folds one half,
        then they swap the halves), but one round trip instead of two. With many pieces in flight, the others fill the
        time between the round trips and gloo's threads fold beside the caller. On a slow link all are swapped, packed.
        """
        if self._packing is not None and self._packing.packs(buffer):
            theirs = self._packing.room_for(buffer)
            return PendingAllReduce(
                self._swap(self._packing.pack(buffer), theirs, call), buffer, theirs, op, is_packed=True
            )
        if is_alone and len(self.ranks) == 2:
            theirs = torch.empty_like(buffer)
            return PendingAllReduce(self._swap(buffer, theirs, call), buffer, theirs, op)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(op.to_torch())
        return PendingAllReduce((self._group.allreduce([buffer], options),), buffer, None, op)

    def all_reduce(self, buffer: Tensor, op: ReduceOp, call: Call) -> None:
        """Fold `buffer` over the group, in place."""
        self.finish(self.start_all_reduce(buffer, op, call, is_alone=True), call)

    def finish(self, pending: PendingAllReduce, call: Call) -> None:
        """Wait until the call's deadline; the buffer then holds the result."""
        for work in pending.works:
            self.wait(work, call)
        theirs = pending.theirs
        if theirs is not None and self._packing is not None and pending.is_packed:
            theirs = self._packing.unpack(theirs, pending.buffer, call)
        if theirs is not None:
            # Both fold in the order of nodes, so they get the same bits, NaNs and zeros included.
            fold_into(pending.buffer, theirs, pending.op, is_incoming_first=self.index > 0)

    def timed(self, num_bytes: int, spent_s: float, call: Call) -> None:
        """Record how long a large all-reduce took, to decide whether to pack; every rank of the group calls it."""
        if self._packing is not None and self._packing.timed(num_bytes, spent_s):
            mine = self._packing.seen()
            theirs = torch.empty_like(mine)
            for work in self._swap(mine, theirs, call):
                self.wait(work, call)
            self._packing.agree(theirs)

    def _swap(self, mine: Tensor, theirs: Tensor, call: Call) -> tuple[dist.Work, dist.Work]:
        """Start sending to the other of two nodes and receiving from it.

        The message may be shorter than the memory for it: gloo only checks that it is not longer.
        """
        with self._explained(call):
            arriving = self._group.recv([theirs], 1 - self.index, _SWAP_TAG)
            return self._group.send([mine], 1 - self.index, _SWAP_TAG), arriving

    def broadcast(self, buffer: Tensor, root: int, call: Call) -> None:
        """Make every rank's `buffer` equal to the root's."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        self.wait(self._group.broadcast([buffer], options), call)

    def all_gather(self, outputs: Sequence[Tensor], source: Tensor, call: Call) -> None:
        """Fill outputs[i] with the source of rank i; all of one size."""
        self.wait(self._group.allgather([list(outputs)], [source]), call)

    def reduce_scatter(self, output: Tensor, sources: Sequence[Tensor], op: ReduceOp, call: Call) -> None:
        """Fill `output` with the fold of everybody's sources[this rank]; all of one size."""
        options = dist.ReduceScatterOptions()
        options.reduceOp = dist.ReduceOp(op.to_torch())
        self.wait(self._group.reduce_scatter([output], [list(sources)], options), call)

    def all_to_all(self, output: Tensor, source: Tensor, taken: list[int], given: list[int], call: Call) -> None:
        """Send given[i] elements of `source` to rank i and fill `output` with taken[i] of each."""
        self.wait(self._group.alltoall_base(output, source, taken, given), call)

    def barrier(self, call: Call) -> None:
        """Return when every rank has called it."""
        self.wait(self._group.barrier(), call)

    def send(self, buffer: Tensor, peer: int, tag: int, work: PendingWork, call: Call) -> None:
        """Start sending; a separate thread waits, because gloo has no callback."""
        with self._explained(call):
            pending = self._group.send([buffer], peer, tag)
        self._complete_later(pending, work, call)

    def receive(self, buffer: Tensor, peer: int, tag: int, work: PendingWork, call: Call) -> None:
        """Start receiving from one rank."""
        with self._explained(call):
            pending = self._group.recv([buffer], peer, tag)
        self._complete_later(pending, work, call)

    def wait(self, work: dist.Work, call: Call) -> None:
        """Wait until the call's deadline; gloo's errors become ours, which name the operation."""
        with self._explained(call):
            work.wait(timedelta(seconds=call.timeout_ns / 1e9))

    def abort(self, reason: str) -> None:
        """Cut the connections: every call blocked on them raises an error with the first reason."""
        self._reason = self._reason or reason
        self._connections.cut()

    def close(self) -> None:
        """Nothing is left to do: gloo's threads end with the group."""

    def _complete_later(self, pending: dist.Work, work: PendingWork, call: Call) -> None:
        def complete() -> None:
            error: TorshError | None = None
            try:
                self.wait(pending, call)
            except TorshError as raised:
                error = raised
            work.complete(error)

        threading.Thread(target=complete, name="torsh-inter-node", daemon=True).start()

    @contextmanager
    def _explained(self, call: Call) -> Iterator[None]:
        """Translate gloo's errors; it may also refuse to start on a closed connection."""
        started = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            is_late = time.monotonic() - started >= 0.98 * call.timeout_ns / 1e9
            raise self._explain(error, call, is_late) from error

    def _explain(self, error: RuntimeError, call: Call, is_late: bool) -> TorshError:
        facts: dict[str, Any] = {"operation": call.operation, "sequence": call.sequence, "backend": "torsh"}
        if self._reason is not None:
            return CommunicationError(f"the group was aborted: {self._reason}", **facts)
        if is_late:
            return OperationTimeout(
                f"{call.operation} number {call.sequence} was not done between the nodes within "
                f"{call.timeout_ns / 1e9:g} s",
                nodes_of_ranks=self.ranks,
                **facts,
            )
        return CommunicationError(
            f"{call.operation} failed between the nodes: {first_line(error)}",
            hint="a rank on another node or the network between them failed: look at the first rank that failed",
            peers=self.ranks,
            **facts,
        )
