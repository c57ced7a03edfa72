"""The group between nodes under TLS: what `InterNodeGroup` does with gloo, over our own encrypted connections.

torch's gloo has TLS in its source but not in the wheels, NCCL has none. Every result is folded in the order of ranks,
once for each part, so all ranks get the same bits.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_distributed.comm.backends.handles import PendingWork
from torsh_distributed.comm.backends.hierarchical.tls_links import MessageKey, TlsLinks
from torsh_distributed.comm.backends.wire import Call
from torsh_distributed.comm.folding import fold_into
from torsh_distributed.comm.meeting.network_interface import listening_address
from torsh_distributed.comm.meeting.store_meeting import StoreMeeting
from torsh_distributed.comm.reduce_op import ReduceOp
from torsh_distributed.comm.serial_thread import SerialThread
from torsh_distributed.comm.trust.job_secret import job_secret
from torsh_distributed.comm.trust.job_tls import JobTls
from torsh_distributed.errors import CommunicationError, ConfigurationError, OperationTimeout, TorshError

_WHOLE_BYTES = 1 << 16
"""Up to this size every rank sends all it has to every other, instead of parts in two rounds."""


class TlsInterNodeGroup:
    """Ranks of several nodes; ranks and roots in the calls below are indices into `ranks`."""

    def __init__(self, store: dist.Store, ranks: Sequence[int], rank: int, timeout: timedelta, *, tls: JobTls) -> None:
        self.ranks = tuple(ranks)
        self.index = self.ranks.index(rank)
        self._reason: str | None = None
        self._numbers = itertools.count()
        self._thread = SerialThread("torsh-tls")
        secret = job_secret()
        if secret is None:
            raise ConfigurationError(
                "TLS between nodes needs the job's secret, which says which certificates belong to the job",
                hint="start the job with `torsh run --tls --token-file FILE`",
            )
        limit_s = timeout.total_seconds()
        meeting = StoreMeeting(
            store, rank=self.index, num_ranks=len(self.ranks), timeout_s=limit_s, operation="connect nodes under TLS"
        )
        self._links = TlsLinks(
            tls,
            secret,
            index=self.index,
            num_ranks=len(self.ranks),
            host=listening_address(os.environ),
            timeout_s=limit_s,
            tell=lambda own: [(str(host), int(port)) for host, port in meeting.exchange("tls", own)],
        )

    @property
    def _others(self) -> list[int]:
        return [other for other in range(len(self.ranks)) if other != self.index]

    def supports(self, op: ReduceOp, dtype: torch.dtype) -> bool:
        """Whether these can be folded: the ranks fold themselves what they can on a node."""
        return True

    # Collectives: each has a number, the same on all ranks, since all call them in one order

    def start_all_reduce(self, buffer: Tensor, op: ReduceOp, call: Call, *, is_alone: bool) -> Future[object]:
        """Start folding `buffer` over the group, in place; `finish` waits for it."""
        return self._start(lambda number, deadline_s: self._all_reduce(buffer, op, number, deadline_s), call)

    def all_reduce(self, buffer: Tensor, op: ReduceOp, call: Call) -> None:
        """Fold `buffer` over the group, in place."""
        self.finish(self.start_all_reduce(buffer, op, call, is_alone=True), call)

    def finish(self, pending: Future[object], call: Call) -> None:
        """Wait until the call's deadline; the buffer then holds the result."""
        try:
            pending.result(timeout=call.timeout_ns / 1e9 + 1.0)
        except (OSError, ValueError, TimeoutError) as error:
            self._explain(error, call)

    def timed(self, num_bytes: int, spent_s: float, call: Call) -> None:
        """Nothing is learned from it: messages are not packed here."""

    def broadcast(self, buffer: Tensor, root: int, call: Call) -> None:
        """Make every rank's `buffer` equal to the root's."""

        def act(number: int, deadline_s: float) -> None:
            if self.index == root:
                self._flush([self._send(other, number, 0, buffer) for other in self._others], deadline_s)
            else:
                buffer.copy_(self._take(root, number, 0, buffer, deadline_s))

        self._do(act, call)

    def all_gather(self, outputs: Sequence[Tensor], source: Tensor, call: Call) -> None:
        """Fill outputs[i] with the source of rank i; all of one size."""
        self._do(lambda number, deadline_s: self._gather_all(outputs, source, number, 0, deadline_s), call)

    def reduce_scatter(self, output: Tensor, sources: Sequence[Tensor], op: ReduceOp, call: Call) -> None:
        """Fill `output` with the fold of everybody's sources[this rank]; all of one size."""
        self._do(lambda number, until: output.copy_(self._fold_own(sources, op, number, until)), call)

    def all_to_all(self, output: Tensor, source: Tensor, taken: list[int], given: list[int], call: Call) -> None:
        """Send given[i] elements of `source` to rank i and fill `output` with taken[i] of each."""

        def act(number: int, deadline_s: float) -> None:
            parts, spaces = torch.split(source, given), torch.split(output, taken)
            if given[self.index]:
                spaces[self.index].copy_(parts[self.index])
            sent = [self._send(other, number, 0, parts[other]) for other in self._others if given[other]]
            for other in self._others:
                if taken[other]:
                    spaces[other].copy_(self._take(other, number, 0, spaces[other], deadline_s))
            self._flush(sent, deadline_s)

        self._do(act, call)

    def barrier(self, call: Call) -> None:
        """Return when every rank has called it."""
        nothing = torch.empty(0, dtype=torch.uint8)
        self._do(lambda number, until: self._gather_all([nothing] * len(self.ranks), nothing, number, 0, until), call)

    def _all_reduce(self, buffer: Tensor, op: ReduceOp, number: int, deadline_s: float) -> None:
        size = len(self.ranks)
        if size == 2 or buffer.nbytes <= _WHOLE_BYTES:
            everyone = [buffer if other == self.index else torch.empty_like(buffer) for other in range(size)]
            self._gather_all(everyone, buffer, number, 0, deadline_s)
            buffer.copy_(_folded(everyone, op))
            return
        edges = [index * buffer.numel() // size for index in range(size + 1)]
        parts = [buffer[start:stop] for start, stop in itertools.pairwise(edges)]
        mine = self._fold_own(parts, op, number, deadline_s)
        self._gather_all(parts, mine, number, 1, deadline_s)

    def _fold_own(self, parts: Sequence[Tensor], op: ReduceOp, number: int, deadline_s: float) -> Tensor:
        """Everybody's parts[this rank], folded; the others get theirs."""
        sent = [self._send(other, number, 0, parts[other]) for other in self._others]
        own = parts[self.index]
        everyone = [
            own if other == self.index else self._take(other, number, 0, own, deadline_s)
            for other in range(len(self.ranks))
        ]
        total = _folded(everyone, op)
        self._flush(sent, deadline_s)
        return total

    def _gather_all(self, outputs: Sequence[Tensor], source: Tensor, number: int, part: int, deadline_s: float) -> None:
        sent = [self._send(other, number, part, source) for other in self._others]
        if outputs[self.index].data_ptr() != source.data_ptr():
            outputs[self.index].copy_(source)
        for other in self._others:
            outputs[other].copy_(self._take(other, number, part, outputs[other], deadline_s))
        self._flush(sent, deadline_s)

    # Messages between two ranks

    def send(self, buffer: Tensor, peer: int, tag: int, work: PendingWork, call: Call) -> None:
        """Start sending; the work is complete when the memory may be used again."""
        self._refuse_aborted(call)
        sent = self._links.send(peer, MessageKey(False, tag), _bytes_of(buffer))
        sent.add_done_callback(lambda done: work.complete(self._explained(done.exception(), call)))

    def receive(self, buffer: Tensor, peer: int, tag: int, work: PendingWork, call: Call) -> None:
        """Start receiving from one rank."""
        self._refuse_aborted(call)
        key = MessageKey(False, tag)
        timer: threading.Timer

        def taker(found: memoryview | Exception) -> None:
            timer.cancel()
            error: TorshError | None = None
            if isinstance(found, Exception):
                error = self._explained(found, call)
            else:
                try:
                    with torch.inference_mode():
                        buffer.view(-1).copy_(_tensor_of(found, buffer))
                except ValueError as wrong:
                    error = self._explained(wrong, call)
            work.complete(error)

        def give_up() -> None:
            if self._links.withdraw(peer, key, taker):
                work.complete(self._explained(TimeoutError(), call))

        timer = threading.Timer(call.timeout_ns / 1e9, give_up)
        timer.daemon = True
        timer.start()
        self._links.hand_over(peer, key, taker)

    def abort(self, reason: str) -> None:
        """Cut the connections: every call blocked on them raises an error with the first reason."""
        self._reason = self._reason or reason
        self._links.close()

    def close(self) -> None:
        """End the connections and the threads."""
        self._thread.stop()
        self._links.close()

    # Running, and failing

    def _start(self, act: Callable[[int, float], object], call: Call) -> Future[object]:
        self._refuse_aborted(call)
        deadline_s = time.monotonic() + call.timeout_ns / 1e9
        return self._thread.submit(_in_inference_mode, act, next(self._numbers), deadline_s)

    def _do(self, act: Callable[[int, float], object], call: Call) -> None:
        self.finish(self._start(act, call), call)

    def _send(self, other: int, number: int, part: int, values: Tensor) -> Future[None]:
        return self._links.send(other, MessageKey(True, number, part), _bytes_of(values))

    def _take(self, other: int, number: int, part: int, like: Tensor, deadline_s: float) -> Tensor:
        return _tensor_of(self._links.take(other, MessageKey(True, number, part), deadline_s), like)

    def _flush(self, sent: Sequence[Future[None]], deadline_s: float) -> None:
        """Return when the memory that was sent may be used again."""
        for one in sent:
            one.result(timeout=max(0.0, deadline_s - time.monotonic()))

    def _refuse_aborted(self, call: Call) -> None:
        if self._reason is not None:
            raise self._error(ConnectionResetError(), call)

    def _explain(self, error: BaseException, call: Call) -> NoReturn:
        raise self._error(error, call) from error

    def _explained(self, error: BaseException | None, call: Call) -> TorshError | None:
        return None if error is None else self._error(error, call)

    def _error(self, error: BaseException, call: Call) -> TorshError:
        facts: dict[str, Any] = {"operation": call.operation, "sequence": call.sequence, "backend": "torsh"}
        if self._reason is not None:
            return CommunicationError(f"the group was aborted: {self._reason}", **facts)
        if isinstance(error, TimeoutError):
            return OperationTimeout(
                f"{call.operation} number {call.sequence} was not done between the nodes within "
                f"{call.timeout_ns / 1e9:g} s",
                nodes_of_ranks=self.ranks,
                **facts,
            )
        return CommunicationError(
            f"{call.operation} failed between the nodes: {error}",
            hint="a rank on another node or the network between them failed: look at the first rank that failed",
            peers=self.ranks,
            **facts,
        )


def _in_inference_mode(act: Callable[[int, float], object], number: int, deadline_s: float) -> None:
    """The groups above work in it, and their tensors may be changed in it alone."""
    with torch.inference_mode():
        act(number, deadline_s)


def _folded(parts: Sequence[Tensor], op: ReduceOp) -> Tensor:
    """The fold in the order of ranks, in memory of its own."""
    total = parts[0].clone()
    for part in parts[1:]:
        fold_into(total, part, op)
    return total


def _bytes_of(values: Tensor) -> memoryview:
    if not values.numel():
        return memoryview(b"")
    return values.detach().contiguous().view(-1).view(torch.uint8).numpy().data


def _tensor_of(body: memoryview, like: Tensor) -> Tensor:
    if len(body) != like.nbytes:
        raise ValueError(f"a message of {len(body)} bytes came where {like.nbytes} were expected")
    if not body:
        return like.new_empty(0)
    return torch.frombuffer(body, dtype=like.dtype)
