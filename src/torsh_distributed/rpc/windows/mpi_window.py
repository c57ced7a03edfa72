"""Windows over MPI-3 RMA: for the processes of one MPI job, on one node or on many, over whatever MPI found there.

Allocated by MPI (its function Win_allocate), since a window over a user's memory waits until its owner enters MPI.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from torsh_distributed.comm.backends.mpi.library import MpiLibrary, library
from torsh_distributed.errors import BackendError, InvalidArgument, OperationTimeout
from torsh_distributed.rpc.windows.one_sided_window import ATOMIC_DTYPES, WHOLE_DTYPES, OneSidedWindow
from torsh_distributed.rpc.windows.rdma_devices import RdmaLink, require_rdma

if TYPE_CHECKING:
    from mpi4py import MPI

_NAMES = {torch.int32: "INT32_T", torch.int64: "INT64_T", torch.float32: "FLOAT", torch.float64: "DOUBLE"}
_MOST_BYTES = 1 << 30
"""Of one operation: counts of MPI are C's int."""
_LOCK_BYTES = 64


class _MpiMemory:
    """The memory of all processes, as MPI knows it."""

    def __init__(self, mpi_library: MpiLibrary, win: MPI.Win, locals_: set[int], timeout_s: float) -> None:
        self.library = mpi_library
        self.mpi: Any = mpi_library.mpi
        self.win = win
        self.ranks_here = locals_
        self.timeout_s = timeout_s
        self.is_closed = False

    def close(self) -> None:
        """Every process calls this. Before MPI ends it happens by itself."""
        if not self.is_closed:
            self.is_closed = True
            self.win.Unlock_all()
            self.win.Free()


class MpiWindow(OneSidedWindow):
    """The memory of one process of the MPI job. `close`, which every process calls, closes those of all."""

    def __init__(self, allocation: _MpiMemory, rank: int, shape: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__(shape, dtype)
        self.rank = rank
        self._all = allocation
        is_here = rank in allocation.ranks_here
        self.provider = f"MPI ({allocation.library.version})"
        # On a node MPI copies in memory that it shares; what its libraries do between nodes it does not say.
        self.kernel_bypass = True if is_here else None
        self._is_here = is_here
        self._type = getattr(allocation.mpi, _NAMES[dtype]) if dtype in _NAMES else None

    @property
    @override
    def tensor(self) -> Tensor:
        if self.rank != self._all.library.world.Get_rank():
            raise InvalidArgument("the memory is another process's", hint="use get and put", owner=self.rank)
        self._all.win.Sync()
        whole = torch.frombuffer(self._all.win.tomemory(), dtype=torch.uint8)
        return whole[_LOCK_BYTES : _LOCK_BYTES + self._numel * self.dtype.itemsize].view(self.dtype).view(self.shape)

    @override
    def put(self, values: Tensor, place: int = 0) -> None:
        self._in_pieces(self._checked(values, place), place, self._all.win.Put)

    @override
    def _read(self, place: int, out: Tensor) -> None:
        self._in_pieces(out, place, self._all.win.Get)

    @override
    def accumulate(self, values: Tensor, place: int = 0) -> None:
        self._need_dtype(ATOMIC_DTYPES)
        values = self._checked(values, place)
        step = _MOST_BYTES // self.dtype.itemsize
        for start in range(0, values.numel(), step):
            piece = values.view(-1)[start : start + step].numpy()
            target = [self._place(place + start), piece.size, self._type]
            self._do(partial(self._all.win.Accumulate, [piece, self._type], self.rank, target))

    @override
    def fetch_and_add(self, place: int, value: float) -> int | float:
        self._check_range(place, 1)
        self._need_dtype(ATOMIC_DTYPES)
        found = self._fetch_and_op(self._place(place), torch.tensor([value], dtype=self.dtype), self._type)
        return found.item()

    def _fetch_and_op(self, offset: int, value: Tensor, kind: Any) -> Tensor:
        before = torch.empty_like(value)
        call = self._all.win.Fetch_and_op
        self._do(lambda: call([value.numpy(), kind], [before.numpy(), kind], self.rank, offset, op=self._all.mpi.SUM))
        return before

    @override
    def compare_and_swap(self, place: int, expected: int, wanted: int) -> int:
        self._check_range(place, 1)
        self._need_dtype(WHOLE_DTYPES)
        return self._swap(self._place(place), expected, wanted, self.dtype)

    def _swap(self, offset: int, expected: int, wanted: int, dtype: torch.dtype) -> int:
        kind = getattr(self._all.mpi, _NAMES[dtype])
        new, old = (torch.tensor([one], dtype=dtype).numpy() for one in (wanted, expected))
        before = torch.empty(1, dtype=dtype)
        call = self._all.win.Compare_and_swap
        self._do(lambda: call([new, kind], [old, kind], [before.numpy(), kind], self.rank, offset))
        return int(before)

    @override
    def fence(self) -> None:
        self._all.win.Sync()  # each operation has ended at its target when it returns

    @contextmanager
    @override
    def lock(self, *, timeout_s: float = 60.0) -> Iterator[bool]:
        """As in every window, but the lock of a process that is killed stays: MPI ends such a job."""
        mine = self._all.library.world.Get_rank() + 1
        deadline_s, pause_s = time.monotonic() + timeout_s, 1e-5
        while (holder := self._swap(0, 0, mine, torch.int64)) != 0:
            if holder == mine:
                raise InvalidArgument("this process holds the window's lock already")
            if time.monotonic() >= deadline_s:
                raise OperationTimeout(
                    "another process holds the window's lock",
                    operation="lock",
                    timeout_s=timeout_s,
                    holder=f"rank {holder - 1}",
                )
            # MPI tells nobody when a number changes.
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1e-3)
        try:
            yield False
        finally:
            self._swap(0, mine, 0, torch.int64)

    @override
    def close(self) -> None:
        self._all.close()

    def _place(self, place: int) -> int:
        return _LOCK_BYTES + place * self.dtype.itemsize

    def _in_pieces(self, values: Tensor, place: int, call: Callable[..., object]) -> None:
        if not values.numel():
            return
        data = values.view(-1).view(torch.uint8).numpy()
        kind = self._all.mpi.BYTE
        for start in range(0, data.nbytes, _MOST_BYTES):
            piece = data[start : start + _MOST_BYTES]
            target = [self._place(place) + start, piece.nbytes, kind]
            self._do(partial(call, [piece, kind], self.rank, target))

    def _do(self, operation: Callable[[], object]) -> None:
        """One operation, until it has ended at the target; with a deadline where that is on another node."""
        allocation = self._all
        if allocation.is_closed:
            raise BackendError("the window was closed", backend="mpi4py")

        def call() -> None:
            operation()
            allocation.win.Flush(self.rank)

        if self._is_here:
            call()
        elif not allocation.library.call_within(call, allocation.timeout_s):
            raise OperationTimeout(
                f"an operation on the window of rank {self.rank} did not end in time",
                hint="its process or node may be gone",
                operation="window",
                timeout_s=allocation.timeout_s,
            )


def mpi_windows(
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    device: RdmaLink | None = None,
    timeout_s: float = 60.0,
) -> list[MpiWindow]:
    """A window of zeros in every process of the MPI job, by rank; all of them call this, with the same arguments.

    Needs the extra `mpi`, and a job that mpiexec or `torsh run` has started with MPI. `device`: raise
    FeatureNotAvailable unless this node has one.
    """
    if any(size < 0 for size in shape):
        raise InvalidArgument("a window has a shape", shape=tuple(shape))
    if device is not None:
        require_rdma(device)
    found = library()
    found.start(timeout_s)
    num_bytes = _LOCK_BYTES + max(1, math.prod(shape)) * dtype.itemsize
    made: list[MPI.Win] = []
    here: set[int] = set()

    def allocate() -> None:
        world, mpi = found.world, found.mpi
        node = world.Split_type(mpi.COMM_TYPE_SHARED)
        here.update(node.allgather(world.Get_rank()))
        node.Free()
        win = mpi.Win.Allocate(num_bytes, 1, comm=world)
        win.tomemory()[:] = bytes(num_bytes)
        win.Lock_all()
        world.Barrier()  # zeros are everywhere before anybody writes
        made.append(win)

    if not found.call_within(allocate, timeout_s):
        raise OperationTimeout(
            "the windows were not allocated in time",
            hint="every process of the MPI job calls mpi_windows",
            operation="mpi_windows",
            timeout_s=timeout_s,
        )
    allocation = _MpiMemory(found, made[0], here, timeout_s)
    found.register(allocation, timeout_s)
    return [MpiWindow(allocation, rank, shape, dtype) for rank in range(found.world.Get_size())]
