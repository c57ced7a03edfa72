"""The mean of a scalar over ranks, communicated while backward computes and read without waiting for backward."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.comm.collectives.work import Work
from torsh_distributed.parallel.host_value import HostValue
from torsh_distributed.parallel.strategy import PendingNumber


def mean_over(value: Tensor, group: dist.ProcessGroup) -> PendingNumber:
    """Start averaging a scalar over the group; every rank of it calls this. `value` is not changed.

    Our CPU backends communicate when the mean is waited for: a small synchronous sum costs less there than waking a
    background thread.
    """
    sent = value.detach().float() / group.size()
    if group.size() == 1:
        return HostValue(sent)
    if not sent.is_cuda and dist.get_backend(group) in _QUICK_BACKENDS:
        return _LateMean(sent, group)
    work = all_reduce(sent, group=group, async_op=True)
    return _CudaMean(work, sent) if sent.is_cuda else _StartedMean(work)


_QUICK_BACKENDS = ("torsh", "shm")


class _LateMean(PendingNumber):
    def __init__(self, sent: Tensor, group: dist.ProcessGroup) -> None:
        self._sent = sent
        self._group = group

    @override
    def wait(self) -> float:
        return float(all_reduce(self._sent, group=self._group))


class _StartedMean(PendingNumber):
    def __init__(self, work: Work[Tensor]) -> None:
        self._work = work

    @override
    def wait(self) -> float:
        return float(self._work.wait())


class _CudaMean(PendingNumber):
    """Copied to the host on a second stream: reading it does not wait for kernels queued later."""

    def __init__(self, work: Work[Tensor], sent: Tensor) -> None:
        aside = torch.cuda.Stream(sent.device)  # type: ignore[no-untyped-call]  # untyped in torch
        aside.wait_stream(torch.cuda.current_stream(sent.device))
        with torch.cuda.stream(aside):
            self._mean = HostValue(work.wait())
            sent.record_stream(aside)

    @override
    def wait(self) -> float:
        return self._mean.wait()
