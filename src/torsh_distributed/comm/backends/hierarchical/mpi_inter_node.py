"""The group between nodes over MPI: what `InterNodeGroup` does with gloo, where the fabric is MPI's.

Inside a node nothing changes: memory is shared. Between nodes each group has a communicator of its own, and calls go
through the wire of the `mpi4py` backend, with its deadlines, its abort and its errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_distributed.comm.backends.handles import PendingWork
from torsh_distributed.comm.backends.mpi.group import create_mpi_wire
from torsh_distributed.comm.backends.wire import Call
from torsh_distributed.comm.reduce_op import ReduceOp
from torsh_distributed.comm.serial_thread import SerialThread


class MpiInterNodeGroup:
    """Ranks of several nodes; ranks and roots in the calls below are indices into `ranks`."""

    def __init__(
        self,
        store: dist.Store,
        ranks: Sequence[int],
        rank: int,
        timeout: timedelta,
        *,
        world_ranks: Sequence[int],
        world_size: int,
        name: str,
    ) -> None:
        """`world_ranks`: those of `ranks` in the world of `world_size`. `name` tells the job's communicators apart."""
        self.ranks = tuple(ranks)
        self.index = self.ranks.index(rank)
        self._wire = create_mpi_wire(
            store, rank=self.index, members=world_ranks, world_size=world_size, name=name, timeout=timeout
        )
        self._thread = SerialThread("torsh-mpi")

    def supports(self, op: ReduceOp, dtype: torch.dtype) -> bool:
        """Whether MPI, or torch inside MPI's algorithm, can fold these."""
        return self._wire.supports(op, dtype)

    def start_all_reduce(self, buffer: Tensor, op: ReduceOp, call: Call, *, is_alone: bool) -> Future[None] | None:
        """Start folding `buffer` over the group, in place; `finish` waits for it. None: it is done already.

        Several pieces run one after the other on a thread, while the caller folds the next one in memory.
        """
        if is_alone:
            self._wire.all_reduce(buffer, op, call)
            return None
        return self._thread.submit(self._wire.all_reduce, buffer, op, call)

    def all_reduce(self, buffer: Tensor, op: ReduceOp, call: Call) -> None:
        """Fold `buffer` over the group, in place."""
        self._wire.all_reduce(buffer, op, call)

    def finish(self, pending: Future[None], call: Call) -> None:
        """Wait for the end; the wire keeps the call's deadline. The buffer then holds the result."""
        pending.result()

    def timed(self, num_bytes: int, spent_s: float, call: Call) -> None:
        """Nothing is learned from it: messages are not packed here."""

    def broadcast(self, buffer: Tensor, root: int, call: Call) -> None:
        """Make every rank's `buffer` equal to the root's."""
        self._wire.broadcast(buffer, root, call)

    def all_gather(self, outputs: Sequence[Tensor], source: Tensor, call: Call) -> None:
        """Fill outputs[i] with the source of rank i; all of one size."""
        self._wire.all_gather(outputs, source, call)

    def reduce_scatter(self, output: Tensor, sources: Sequence[Tensor], op: ReduceOp, call: Call) -> None:
        """Fill `output` with the fold of everybody's sources[this rank]; all of one size."""
        self._wire.reduce_scatter(output, sources, op, call)

    def all_to_all(self, output: Tensor, source: Tensor, taken: list[int], given: list[int], call: Call) -> None:
        """Send given[i] elements of `source` to rank i and fill `output` with taken[i] of each."""
        self._wire.all_to_all(torch.split(output, taken), torch.split(source, given), call)

    def barrier(self, call: Call) -> None:
        """Return when every rank has called it."""
        self._wire.barrier(call)

    def send(self, buffer: Tensor, peer: int, tag: int, work: PendingWork, call: Call) -> None:
        """Start sending; a thread of the wire's completes the work."""
        self._wire.send(buffer, peer, tag, work, call)

    def receive(self, buffer: Tensor, peer: int, tag: int, work: PendingWork, call: Call) -> None:
        """Start receiving from one rank."""
        self._wire.receive(buffer, peer, tag, work, call)

    def abort(self, reason: str) -> None:
        """Release every blocked call here and on the other ranks, with this reason."""
        self._wire.abort(reason)

    def close(self) -> None:
        """Leave the communicator and end the thread."""
        self._thread.stop()
        self._wire.close()
