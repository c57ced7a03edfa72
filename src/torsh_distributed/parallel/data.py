"""Data parallelism on torch's DDP: every rank holds the whole model and works on its part of the batch."""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the classes themselves.

import inspect
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from torsh_distributed import events
from torsh_distributed.comm.collectives import all_reduce
from torsh_distributed.comm.work import Work
from torsh_distributed.parallel.buckets import Reduce, bucket_reducer
from torsh_distributed.parallel.intervals import covered_s
from torsh_distributed.parallel.strategy import PendingMean, Strategy, check_one_device
from torsh_distributed.plan import BucketConfig
from torsh_distributed.plan.distributed import DistributedConfig

# torch 2.13 renames the argument; 2.11 knows only the old name. Drop with support for torch < 2.13.
_NEW_NAME = "forward_sync_buffers"
_BUFFERS = (
    _NEW_NAME if _NEW_NAME in inspect.signature(DistributedDataParallel.__init__).parameters else "broadcast_buffers"
)


class DataParallel(Strategy):
    """Replicas kept equal by averaging gradients in buckets while backward still computes."""

    def __init__(
        self,
        model: nn.Module,
        config: BucketConfig,
        distributed: DistributedConfig | None = None,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        world = dist.group.WORLD
        assert world is not None, "parallelize() checks that the group is up"
        self._group = group or world
        device = check_one_device(model)
        reduce = bucket_reducer(distributed or DistributedConfig(), self._group, device)
        self._ddp = DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            process_group=self._group,
            bucket_cap_mb=config.max_bucket_size_mb,
            find_unused_parameters=config.find_unused_parameters,
            static_graph=config.static_graph,
            gradient_as_bucket_view=config.gradient_as_bucket_view,
            **{_BUFFERS: config.broadcast_buffers},  # type: ignore[arg-type]  # mypy cannot see which name it is
        )
        self._clock = _BucketClock()
        self._ddp.register_comm_hook(_HookState(self.data_degree, reduce, self._clock), _average_and_time)

    @property
    @override
    def model(self) -> nn.Module:
        return self._ddp

    @property
    @override
    def data_rank(self) -> int:
        return dist.get_rank(self._group)

    @property
    @override
    def data_degree(self) -> int:
        return dist.get_world_size(self._group)

    @override
    def accumulating(self, *, is_last: bool) -> AbstractContextManager[None]:
        return _nothing() if is_last else self._ddp.no_sync()

    @override
    def mean_loss(self, loss: Tensor) -> PendingMean:
        value = loss.detach().float() / self.data_degree
        return _ReducedMean(all_reduce(value, group=self._group, async_op=True))

    @override
    def clip_grad_norm(self, max_norm: float) -> float:
        # After backward every rank holds the same averaged gradients: the local norm is the norm.
        return float(nn.utils.clip_grad_norm_(self._ddp.parameters(), max_norm))

    @override
    def take_comm_s(self) -> float | None:
        return self._clock.take()


class _ReducedMean(PendingMean):
    def __init__(self, work: Work[Tensor]) -> None:
        self._work = work

    @override
    def wait(self) -> float:
        return float(self._work.wait())


class _BucketClock:
    """When each bucket left and when it was back; the union of these is the time spent communicating."""

    def __init__(self) -> None:
        self.step = 0
        self._intervals: list[tuple[float, float]] = []

    def add(self, index: int, num_bytes: int, start: float, end: float) -> None:
        # list.append is atomic: callbacks run on the backend's threads.
        self._intervals.append((start, end))
        if events.wanted(events.BucketEvent):
            events.emit(events.BucketEvent(step=self.step, index=index, num_bytes=num_bytes, duration_s=end - start))

    def take(self) -> float:
        taken, self._intervals = self._intervals, []
        self.step += 1
        return covered_s(taken)


@dataclass(frozen=True)
class _HookState:
    """What the hook is given: how many ranks share a bucket, how it is summed, and the clock."""

    size: int
    reduce: Reduce
    clock: _BucketClock


def _average_and_time(state: _HookState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's own averaging (divide, then sum), with the time of each bucket noted."""
    buffer = bucket.buffer()
    index, num_bytes = bucket.index(), buffer.numel() * buffer.element_size()
    buffer.div_(state.size)
    # The callback keeps the clock alone: it runs on the backend's thread, where the group must not be freed.
    clock, start = state.clock, time.monotonic()

    def done(future: torch.futures.Future[Tensor]) -> Tensor:
        value = future.value()
        clock.add(index, num_bytes, start, time.monotonic())
        return value

    return state.reduce(buffer).then(done)


@contextmanager
def _nothing() -> Iterator[None]:
    yield
