"""What communication costs here: timings of collectives and of the network.

How long collectives take on the world's group, measured the same way for every backend.
Calls go through torch.distributed, as DDP and FSDP make them; those named `td.` are our own. A block of calls is timed
as a whole, on every rank; the slowest rank counts, because a step waits for it. All ranks agree on the number of calls
in a block.

The network between the ranks of a group: measured by all-reduces, agreed by all ranks, kept over time.
The figures are those of a collective, including what the backend does underneath (shared memory inside a node, say);
bucket sizes and codecs are chosen by them. What single messages between two ranks cost is measured by
`algorithms.auto_choice`, to choose how an all-reduce travels.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_distributed.comm.collectives.call import resolve_group
from torsh_distributed.comm.collectives.moves import c10d_all_gather_single
from torsh_distributed.comm.collectives.reductions import all_reduce, c10d_reduce_scatter_single
from torsh_distributed.errors import InvalidArgument

_BLOCKS = 5
_MAX_CALLS = 20_000


@dataclass(frozen=True, kw_only=True)
class CollectiveTiming:
    """One operation at one size: seconds per call in the median block and in the best one, on the slowest rank."""

    op: str
    num_bytes: int
    median_s: float
    best_s: float
    num_calls: int

    @property
    def bytes_per_s(self) -> float:
        """The buffer's bytes over the median time (algorithm bandwidth)."""
        return self.num_bytes / self.median_s


def _all_reduce(buffer: Tensor, size: int) -> Callable[[], object]:
    return lambda: dist.all_reduce(buffer)


def _our_all_reduce(buffer: Tensor, size: int) -> Callable[[], object]:
    return lambda: all_reduce(buffer)


def _broadcast(buffer: Tensor, size: int) -> Callable[[], object]:
    return lambda: dist.broadcast(buffer, 0)


def _all_gather(buffer: Tensor, size: int) -> Callable[[], object]:
    part = buffer[: buffer.numel() // size].clone()
    whole = buffer[: part.numel() * size]
    return lambda: c10d_all_gather_single(whole, part)


def _reduce_scatter(buffer: Tensor, size: int) -> Callable[[], object]:
    part = buffer[: buffer.numel() // size].clone()
    whole = buffer[: part.numel() * size]
    return lambda: c10d_reduce_scatter_single(part, whole)


def _all_to_all(buffer: Tensor, size: int) -> Callable[[], object]:
    whole = buffer[: buffer.numel() // size * size]
    received = torch.empty_like(whole)
    return lambda: dist.all_to_all_single(received, whole)


OPERATIONS: dict[str, Callable[[Tensor, int], Callable[[], object]]] = {
    "all_reduce": _all_reduce,
    "td.all_reduce": _our_all_reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}


def time_collective(op: str, num_bytes: int, *, duration_s: float = 0.5) -> CollectiveTiming:
    """Time `op` on a float32 buffer of `num_bytes`, for about `duration_s`; every rank of the world calls this.

    The buffer is on this rank's GPU with nccl, else in the memory of the CPU.

    `num_bytes` is the whole buffer: what all_gather fills, what reduce_scatter and all_to_all take in. Every block of
    calls starts with normally distributed values, like gradients: a backend may be faster with equal values.
    """
    if op not in OPERATIONS:
        raise InvalidArgument("unknown operation", hint=f"use one of: {', '.join(OPERATIONS)}", op=op)
    size = dist.get_world_size()
    values = torch.randn(max(num_bytes // 4, size), generator=torch.Generator().manual_seed(dist.get_rank()))
    values = values.to(_device_of(resolve_group(None)))
    buffer = values.clone()
    call = OPERATIONS[op](buffer, size)
    call()

    def block(calls: int) -> float:
        buffer.copy_(values)
        return time_on_all_ranks(call, calls)

    calls = 1
    spent = block(calls)
    # Double until a block is long enough to time; the time is the slowest rank's, so all ranks stop together.
    while spent < duration_s / _BLOCKS / 2 and calls < _MAX_CALLS:
        calls = min(_MAX_CALLS, max(calls * 2, int(calls * duration_s / _BLOCKS / 2 / spent)))
        spent = block(calls)
    per_call = [block(calls) / calls for _ in range(_BLOCKS)]
    return CollectiveTiming(
        op=op,
        num_bytes=num_bytes,
        median_s=statistics.median(per_call),
        best_s=min(per_call),
        num_calls=calls * _BLOCKS,
    )


def time_on_all_ranks(call: Callable[[], object], calls: int) -> float:
    """Seconds that `calls` calls took on the slowest rank of the world; the same number on every rank.

    Every rank calls this. What the calls have queued on a GPU is part of the time.
    """
    _finish_queued()
    dist.barrier()
    started = time.perf_counter()
    for _ in range(calls):
        call()
    _finish_queued()
    spent = torch.tensor(time.perf_counter() - started, dtype=torch.float64, device=_device_of(resolve_group(None)))
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return float(spent)


SIZES = (4 * 1024, 64 * 1024, 1024 * 1024)
"""Bytes of the buffers that are sent, unless `sizes` says otherwise."""

_NUM_TIMES = 3
_LEAST_BYTE_S = 1e-13  # if the larger buffer was not slower, time does not depend on size: ten thousand GB/s
_SEGMENTS = Path("/proc/thread-self/net/snmp")  # of the network namespace that this thread is in
_UNKNOWN = -1.0


@dataclass(frozen=True, kw_only=True)
class NetworkMetrics:
    """One measurement of a group's network: the same numbers on every rank, each that of the slowest rank."""

    num_ranks: int
    all_reduce_s: Mapping[int, float]
    """Seconds of an all-reduce by the bytes of its buffer, the fastest of three."""
    retransmitted: float | None
    """Share of the TCP segments of the worst node that were retransmitted during the measurement. None if nothing
    was sent over TCP, or the system does not count it."""
    congestion: float
    """Time of the largest buffer over the shortest seen so far; 1 is as good as ever."""
    stability: float | None
    """One minus standard deviation over mean (at least 0) of the time of the largest buffer; None at first."""
    time_s: float
    """Wall-clock seconds since the epoch, on the group's first rank."""

    @property
    def byte_s(self) -> float:
        """Seconds per byte of a buffer: the slope between the smallest and the largest."""
        small, large = min(self.all_reduce_s), max(self.all_reduce_s)
        return max((self.all_reduce_s[large] - self.all_reduce_s[small]) / (large - small), _LEAST_BYTE_S)

    @property
    def latency_s(self) -> float:
        """Seconds of an empty all-reduce: what the smallest buffer took, less the time of its bytes."""
        small = min(self.all_reduce_s)
        return max(self.all_reduce_s[small] - self.byte_s * small, 0.0)

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second that a rank sends when a buffer travels in a ring: what a link between ranks must carry."""
        return 2 * (self.num_ranks - 1) / self.num_ranks / self.byte_s

    def estimated_s(self, num_bytes: float) -> float:
        """What an all-reduce of any size should take at these figures."""
        return self.latency_s + num_bytes * self.byte_s


class NetworkProfiler:
    """Measures the network of a group on demand and keeps the last measurements; all its ranks measure together.

    `measure()` costs a dozen all-reduces, three megabytes in all with the default sizes. `device` holds the tensors
    that travel; by default the GPU with nccl and the CPU otherwise.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        sizes: Sequence[int] = SIZES,
        history: int = 50,
        device: torch.device | None = None,
    ) -> None:
        if len(set(sizes)) < 2 or min(sizes) < 4 or history < 1:
            raise InvalidArgument(
                "a network is measured with buffers of at least two different sizes, of 4 bytes or more",
                hint=f"the default sizes are {', '.join(map(str, SIZES))} bytes; history is 1 or more",
                sizes=tuple(sizes),
                history=history,
            )
        self._group = resolve_group(group)
        if self._group.size() == 1:
            raise InvalidArgument("a group of one rank has no network", hint="measure a group of two ranks or more")
        self._device = device or _device_of(self._group)
        self._sizes = sorted(set(sizes))
        self._history: deque[NetworkMetrics] = deque(maxlen=history)
        self._least_s = float("inf")

    @property
    def history(self) -> tuple[NetworkMetrics, ...]:
        """The last measurements, oldest first."""
        return tuple(self._history)

    def measure(self) -> NetworkMetrics:
        """Measure now; every rank of the group calls this, and all get the same numbers."""
        before = _tcp_segments()
        times = _fastest_s(self._sizes, self._group, self._device)
        seen = [*times, _retransmitted(before, _tcp_segments()), _clock(self._group)]
        numbers = torch.tensor(seen, dtype=torch.float64, device=self._device)
        *seconds, retransmitted, time_s = all_reduce(numbers, "max", group=self._group).tolist()
        self._least_s = min(self._least_s, seconds[-1])
        largest = [look.all_reduce_s[self._sizes[-1]] for look in self._history] + [seconds[-1]]
        self._history.append(
            NetworkMetrics(
                num_ranks=self._group.size(),
                all_reduce_s=dict(zip(self._sizes, seconds, strict=True)),
                retransmitted=None if retransmitted == _UNKNOWN else retransmitted,
                congestion=seconds[-1] / self._least_s,
                stability=_stability(largest),
                time_s=time_s,
            )
        )
        return self._history[-1]


def _fastest_s(sizes: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """The shortest of several times: a rank that waits for another measures the other's delay, but not every time."""
    all_reduce(torch.zeros(1, device=device), group=group)  # the first call pays for connections
    found = []
    for num_bytes in sizes:
        buffer, taken = torch.zeros(num_bytes // 4, device=device), []
        for _ in range(_NUM_TIMES):
            started = time.perf_counter()
            all_reduce(buffer, group=group)
            _finish(buffer)
            taken.append(time.perf_counter() - started)
        found.append(min(taken))
    return found


def _clock(group: dist.ProcessGroup) -> float:
    """The first rank's clock; 0 on the others, which take the maximum."""
    return time.time() if group.rank() == 0 else 0.0


def _stability(seconds: Sequence[float]) -> float | None:
    if len(seconds) < 2:
        return None
    return max(0.0, 1 - statistics.stdev(seconds) / statistics.mean(seconds))


def _tcp_segments() -> tuple[int, int] | None:
    """TCP segments that this node has sent and retransmitted so far; None if the system does not count them."""
    try:
        lines = [line.split() for line in _SEGMENTS.read_text().splitlines() if line.startswith("Tcp:")]
    except OSError:
        return None
    counted = dict(zip(*lines, strict=True))
    # The kernel's OutSegs does not include retransmissions.
    return int(counted["OutSegs"]) + int(counted["RetransSegs"]), int(counted["RetransSegs"])


def _retransmitted(before: tuple[int, int] | None, after: tuple[int, int] | None) -> float:
    if before is None or after is None or after[0] == before[0]:
        return _UNKNOWN
    return (after[1] - before[1]) / (after[0] - before[0])


def _device_of(group: dist.ProcessGroup) -> torch.device:
    return torch.device("cuda") if dist.get_backend(group) == "nccl" else torch.device("cpu")


def _finish_queued() -> None:
    """Wait for this process's GPU, if it has used one."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # untyped in torch
        torch.cuda.synchronize()


def _finish(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
