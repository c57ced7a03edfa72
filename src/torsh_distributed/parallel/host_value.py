"""A number of the device, read on the host without waiting for what is computed after it."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from torsh_distributed.parallel.strategy import PendingNumber


class HostValue(PendingNumber):
    """A scalar on its way to the host: `wait` waits for what made it, not for kernels queued later.

    Reading a tensor of the GPU with `float()` waits for all that was queued until then, and leaves the GPU idle while
    the host queues what comes next.
    """

    def __init__(self, value: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        if not value.is_cuda:
            self._host = value
            return
        self._host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        self._host.copy_(value, non_blocking=True)
        self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped in torch
        self._arrived.record(torch.cuda.current_stream(value.device))

    @override
    def wait(self) -> float:
        if self._arrived is not None:
            self._arrived.synchronize()
        return float(self._host)
