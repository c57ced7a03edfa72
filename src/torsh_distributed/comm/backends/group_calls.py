"""What stands around the collectives of a group: messages, checks on this rank, c10d's options, tensors on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from torsh_distributed.comm.backends.executor import Body
from torsh_distributed.comm.backends.handles import PendingWork
from torsh_distributed.comm.backends.short_path import ShortPath
from torsh_distributed.comm.backends.staging import Staged, check_count, check_same_kind, check_tensor
from torsh_distributed.comm.backends.wire import Call
from torsh_distributed.comm.recording.flight_recorder import recorder
from torsh_distributed.errors import InvalidArgument, RankOutOfBounds

_Options = TypeVar("_Options")
ReduceOpLike = dist.ReduceOp | dist.ReduceOp.RedOpType


class GroupCalls(ShortPath):
    """Messages between two ranks, and the checks that all calls share."""

    @override
    def send(self, tensors: list[Tensor], dst: int, tag: int) -> dist.Work:
        """Start sending a tensor to a group rank."""
        tensor = only(tensors, "send")
        call = self._new_call("send")
        self._check_tensor(tensor, call.operation)
        peer = self._check_rank(dst, call.operation)
        [buffer] = Staged([tensor], is_filled=True).tensors if tensor.is_cpu else [self._gpu(tensor).to_host(tensor)]
        work = self._new_transfer(call, [tensor], peer, tag)
        with self._timed(call, [tensor]), _ending(work):
            self._wire.send(buffer, peer, tag, work, call)
        return self._track(work)

    @override
    def recv(self, tensors: list[Tensor], src: int, tag: int) -> dist.Work:
        """Start receiving a tensor from a group rank."""
        return self._receive(tensors, self._check_rank(src, "recv"), tag)

    @override
    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        """Start receiving a tensor from the first rank that sends; the work's `_source_rank()` is that rank."""
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: list[Tensor], src: int | None, tag: int) -> dist.Work:
        tensor = only(tensors, "recv")
        call = self._new_call("recv")
        self._check_tensor(tensor, call.operation)
        if tensor.is_cpu:
            staged = Staged([tensor], is_filled=False)
            [buffer], give_back = staged.tensors, staged.give_back
        else:
            buffer, give_back = self._gpu(tensor).incoming(tensor)
        work = self._new_transfer(call, [tensor], src, tag)
        work.before_completion(give_back)
        with self._timed(call, [tensor]), _ending(work):
            self._wire.receive(buffer, src, tag, work, call)
        return self._track(work)

    def _new_transfer(self, call: Call, tensors: list[Tensor], peer: int | None, tag: int) -> PendingWork:
        self._number(call)
        call.peer, call.tag = peer, tag
        work = self._new_work(call, tensors, self._wire.help_with)
        work.record = self._new_record(call, tensors, peer)
        return work

    # --- checks on this rank ----------------------------------------------------------------------------------

    def _check_rank(self, rank: int, operation: str) -> int:
        if not 0 <= rank < self._wire.num_ranks:
            raise RankOutOfBounds(
                f"rank {rank} is outside 0..{self._wire.num_ranks - 1}",
                operation=operation,
                rank=rank,
                world_size=self._wire.num_ranks,
            )
        return rank

    def _check_pair(self, output: Tensor, source: Tensor, operation: str) -> None:
        self._check_tensor(output, operation)
        self._check_tensor(source, operation)
        check_same_kind([output], source, operation)

    def _check_list(self, tensors: Sequence[Tensor], other: Tensor, operation: str) -> None:
        """One tensor per rank, all of the other side's dtype."""
        check_count(tensors, self._wire.num_ranks, operation)
        check_same_kind(tensors, other, operation)
        for tensor in (*tensors, other):
            self._check_tensor(tensor, operation)

    def _check_tensor(self, tensor: Tensor, operation: str) -> None:
        if not (tensor.is_cuda and tensor.layout == torch.strided and self._wire.takes_gpu):
            check_tensor(tensor, self._wire.name, operation)

    def _body(self, sample: Tensor, operation: Callable[..., None], *args: object) -> Body:
        """A collective of tensors like `sample`, on the wire for its device, to be run by any thread."""
        if sample.is_cpu:
            return partial(operation, self._wire, *args)
        gpu = self._gpu(sample)
        return gpu.after_caller(partial(operation, gpu, *args))


@contextmanager
def _ending(work: PendingWork) -> Iterator[None]:
    """Around the start of a transfer: one that cannot start has ended, for the flight recorder too."""
    try:
        yield
    except BaseException as error:
        if work.record is not None:
            recorder.end_quietly(work.record, error)
        raise


def only(items: Sequence[_Options] | Tensor, operation: str) -> _Options:
    """The single element of c10d's lists of one; a bare tensor stands for itself."""
    if isinstance(items, Tensor):
        return items  # type: ignore[return-value]  # then _Options is Tensor
    if len(items) != 1:
        raise InvalidArgument(
            f"{operation} takes one tensor per rank",
            hint="call it once per tensor; lists of several were for several GPUs per process",
            operation=operation,
            given=len(items),
        )
    return items[0]


def list_for(lists: list[list[Tensor]] | list[Tensor], other: list[Tensor] | Tensor, operation: str) -> list[Tensor]:
    """The list with one tensor per rank; c10d nests it in another one, unless the other side is a bare tensor."""
    return lists if isinstance(other, Tensor) else only(lists, operation)  # type: ignore[return-value,arg-type]  # see above


def reduce_options(
    kind: type[_Options], given: _Options | ReduceOpLike | None, timeout: timedelta | None = None
) -> _Options:
    """c10d's options, from themselves, from a bare reduction, or from nothing."""
    if isinstance(given, kind):
        return timed_options(given, timeout)
    options = kind()
    if given is not None:
        options.reduceOp = given  # type: ignore[attr-defined]  # every kind here has it
    return timed_options(options, timeout)


def rooted_options(kind: type[_Options], given: _Options | int | None, timeout: timedelta | None = None) -> _Options:
    """c10d's options, from themselves, from a bare root, or from nothing."""
    if isinstance(given, kind):
        return timed_options(given, timeout)
    options = kind()
    options.rootRank = given or 0  # type: ignore[attr-defined]  # every kind here has it
    return timed_options(options, timeout)


def timed_options(options: _Options, timeout: timedelta | None) -> _Options:
    """The options, with the deadline that a call was given beside them."""
    if timeout is not None:
        options.timeout = timeout  # type: ignore[attr-defined]  # every kind of options has it
    return options


def refuse_unless_sum(op: dist.ReduceOp) -> None:
    """Raise InvalidArgument for a reduction that sparse tensors do not have."""
    if hash(op) != hash(dist.ReduceOp.SUM):
        raise InvalidArgument(
            "sparse tensors can only be summed",
            hint="densify first with .to_dense()",
            op=str(op),
            operation="all_reduce",
        )
