"""Reads a number from the device without waiting for work queued after it."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from torsh_distributed.parallel.strategy import PendingNumber


class HostValue(PendingNumber):
    """A scalar being copied to the host: `wait` waits for what computed it, not for kernels queued later.

    Reading a GPU tensor with `float()` waits for everything queued until then, and the GPU is idle while the host
    queues what comes next.
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
