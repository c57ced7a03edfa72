"""Tensors in memory that all ranks of a node have mapped: written by one, read in place by the others.

Exchange rows between all ranks in any order: gathered by index when sent, or added up by index when received.
One pass over memory; sorting, sending and adding up would be three. For backends that can, see `takes_rows`.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Sequence
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_distributed.comm.backends.base import TorshProcessGroup
from torsh_distributed.comm.backends.shm.segment import PREAMBLE_BYTES, SegmentAddress, SharedSegment, open_memory_file
from torsh_distributed.comm.backends.shm.wire import ShmWire
from torsh_distributed.comm.backends.wire import BufferUse, Rows, SharedBuffer
from torsh_distributed.comm.collectives.call import num_bytes, run
from torsh_distributed.comm.collectives.objects import all_gather_object
from torsh_distributed.comm.shared_memory.memory_file import MemoryFile
from torsh_distributed.errors import BackendError, TorshError

_log = logging.getLogger(__name__)


def shares_memory(group: dist.ProcessGroup) -> bool:
    """Whether the group communicates through shared memory alone; the same on every rank."""
    return isinstance(group, TorshProcessGroup) and isinstance(group.wire, ShmWire)


def fails_cleanly(group: dist.ProcessGroup) -> bool:
    """Whether all-reduces of this group that failed left their tensors as they were; False if that is unknown.

    True on all ranks that are left means that no rank, those that are gone included, has written to any of them.
    """
    return isinstance(group, TorshProcessGroup) and group.fails_cleanly


def collective_buffer(numel: int, dtype: torch.dtype, group: dist.ProcessGroup, use: BufferUse) -> Tensor | None:
    """A tensor for the next collective of that kind, which then copies less; None if there is none now.

    `shared`: all ranks have the same memory, for the output of all_gather; this rank writes its part of it, which is
    also the source. `per_rank`: each has its own, for the source of reduce_scatter or the output of rows from all.
    Every rank of the group asks in the same order, for `shared` also for the same size. Some ranks may get None: the
    collective is correct in any case. The memory is reused once nothing refers to it.
    """
    return group.collective_buffer(numel, dtype, use) if isinstance(group, TorshProcessGroup) else None


def allocate_shared_memory(num_bytes: int, group: dist.ProcessGroup) -> memoryview | None:
    """Memory that all ranks of the group have mapped, as long as something points into it; None if they cannot.

    Every rank calls this with the same size, and all get it or none does. Callers synchronise their writes themselves.
    One rank takes all pages here, so a lack of memory shows now.
    """
    segment = _shared_segment(num_bytes, group, backed_bytes=PREAMBLE_BYTES + num_bytes)
    if segment is None:
        return None
    segment.close()  # all have it mapped
    return memoryview(segment.memory)[PREAMBLE_BYTES:]


def allocate_memory_file(num_bytes: int, group: dist.ProcessGroup) -> MemoryFile | None:
    """The same, without pages: they are taken by those who write, at the same time, and while they wait for a disk."""
    segment = _shared_segment(num_bytes, group, backed_bytes=PREAMBLE_BYTES)
    return None if segment is None else MemoryFile(segment.memory, segment.fd, start=PREAMBLE_BYTES)


def _shared_segment(num_bytes: int, group: dist.ProcessGroup, *, backed_bytes: int) -> SharedSegment | None:
    """A segment that all ranks have mapped and open, or None on all of them."""
    if num_bytes == 0 or not shares_memory(group):
        return None
    segment, address, problem = None, None, ""
    try:
        if group.rank() == 0:
            segment, address = SharedSegment.create(PREAMBLE_BYTES + num_bytes, backed_bytes=backed_bytes)
    except (TorshError, OSError) as error:  # the others wait to learn of any error
        problem = str(error)
    offered = all_gather_object(asdict(address) if address else None, group=group)[0]
    try:
        if offered is not None and segment is None:
            segment = SharedSegment.open(SegmentAddress(**offered))
    except (TorshError, OSError) as error:
        problem = str(error)
    problems = [text for text in all_gather_object(problem, group=group) if text]
    if problems or segment is None:
        if segment is not None:
            segment.close()
        _log.warning("the ranks of this node cannot share memory for parameters: %s", problems[0].splitlines()[0])
        return None
    return segment


def share_buffer(buffer: Tensor, group: dist.ProcessGroup) -> SharedBuffer | None:
    """Move a tensor, and all its views, to memory that all ranks of the group have mapped; None if they cannot.

    Every rank calls this with a contiguous tensor of the same size, which fills its storage; all get it or none does.
    As long as the result lives, an all-reduce of the tensor reads and writes the ranks' tensors in place.
    """
    if not isinstance(group, TorshProcessGroup) or not group.wire.takes_shared or not buffer.is_cpu:
        return None
    if not all(all_gather_object(_has_room(buffer.nbytes * group.size()), group=group)):
        _log.info("buffers of %d bytes are not shared by the ranks: /dev/shm has too little room", buffer.nbytes)
        return None
    offer: tuple[int, int, int] | None = None
    everyone, problem = list[Tensor](), ""
    try:
        fd, _ = buffer.untyped_storage()._share_fd_cpu_()
        offer = os.getpid(), fd, os.fstat(fd).st_ino
    except (RuntimeError, OSError) as error:  # the others wait to learn of any error
        problem = str(error)
    offers = all_gather_object(offer, group=group)
    try:
        if None not in offers:
            everyone = [
                buffer if rank == group.rank() else _mapped(f"/proc/{pid:d}/fd/{fd:d}", inode, buffer.nbytes)
                for rank, (pid, fd, inode) in enumerate(offers)
            ]
    except (OSError, BackendError) as error:
        problem = str(error)
    problems = [text for text in all_gather_object(problem, group=group) if text]
    if problems:
        _log.warning("the ranks of this node cannot share buffers: %s", problems[0].splitlines()[0])
        return None
    shared = SharedBuffer(buffer, tuple(one.data_ptr() for one in everyone), tuple(everyone))
    group.wire.share(shared)
    return shared


def _has_room(num_bytes: int) -> bool:
    """Whether torch can share that much more: if it cannot, the kernel kills the process instead of raising."""
    try:
        probe = torch.UntypedStorage._new_using_fd_cpu(1)  # where torch puts all that it shares
        place = os.fstatvfs(probe._share_fd_cpu_()[0])
    except (RuntimeError, OSError):
        return False
    return place.f_bavail * place.f_frsize > num_bytes + num_bytes // 4


def _mapped(path: str, inode: int, num_bytes: int) -> Tensor:
    fd = open_memory_file(path, size_bytes=num_bytes)
    try:
        if os.fstat(fd).st_ino != inode:
            raise OSError(f"{path} is not what the other rank has offered")
        return torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)
    finally:
        os.close(fd)


def takes_rows(source: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether the group's backend exchanges such rows itself; the same on every rank if the rows are alike."""
    return isinstance(group, TorshProcessGroup) and group.takes_rows(source)


def new_rows(num_rows: int, dim: int, like: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Empty rows, in shared memory if there is some: other ranks then write to them or read from them in place.

    For the output of `gather_to_all`, which allocates it itself, and the source of `sum_from_all`. Every rank of the
    group calls this at the same points of its program.
    """
    shared = collective_buffer(num_rows * dim, like.dtype, group, "per_rank")
    return like.new_empty((num_rows, dim)) if shared is None else shared.view(num_rows, dim)


def gather_to_all(
    source: Tensor, sent: Tensor, send: Sequence[int], receive: Sequence[int], *, group: dist.ProcessGroup
) -> Tensor:
    """(sum of receive, dim): `source[sent]` split by `send` and exchanged, without building `source[sent]`."""
    rows = Rows(send=send, receive=receive, row_numel=source.shape[1], sent=sent)
    output = new_rows(sum(receive), source.shape[1], source, group)
    return _exchange(output, source.contiguous(), rows, group)


def sum_from_all(
    source: Tensor,
    received: Tensor,
    send: Sequence[int],
    receive: Sequence[int],
    *,
    num_rows: int,
    group: dist.ProcessGroup,
    weights: Tensor | None = None,
) -> Tensor:
    """(num_rows, dim): the rows received, each times its weight, added up at the indices `received`; others are 0."""
    rows = Rows(send=send, receive=receive, row_numel=source.shape[1], received=received, weights=weights)
    output = source.new_empty((num_rows, source.shape[1]))
    return _exchange(output, source.contiguous(), rows, group)


def _exchange(output: Tensor, source: Tensor, rows: Rows, group: dist.ProcessGroup) -> Tensor:
    assert isinstance(group, TorshProcessGroup), "the caller has asked takes_rows"

    def start(_: dist.ProcessGroup, is_async: bool) -> None:
        group.exchange_rows(output, source, rows).wait()

    done = run(
        "all_to_all_rows",
        num_bytes(output),
        start,
        lambda: output,
        same=(source.dtype, source.shape[1:]),
        async_op=False,
        group=group,
    )
    assert isinstance(done, Tensor), "it is synchronous"
    return done
