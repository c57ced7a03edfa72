"""An operation that this rank has submitted, from the call to its result."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torsh_distributed.migrate.horovod.negotiation.request import Request


class PendingOp:
    """One submitted operation. Filled in by the engine's thread; read after `is_done`."""

    __slots__ = ("device_done", "device_ready", "error", "inputs", "is_done", "outputs", "request", "result", "run",
                 "submitted_s")  # fmt: skip

    def __init__(
        self,
        request: Request,
        inputs: list[Tensor],
        outputs: list[Tensor] | None = None,
        run: Callable[..., Any] | None = None,
    ) -> None:
        self.request = request
        self.inputs = inputs
        self.outputs = outputs
        """Where results go; None makes new tensors."""
        self.run = run
        """For operations that bring their own code: called with the group on the engine's thread."""
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_done = False
        self.submitted_s = time.monotonic()
        self.device_ready: torch.cuda.Event | None = None
        self.device_done: torch.cuda.Event | None = None
        if request.device == "cuda":
            self.device_ready = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped in torch
            self.device_ready.record()

    def is_finished(self) -> bool:
        """Whether waiting would not block."""
        if not self.is_done or self.device_done is None:
            return self.is_done
        return bool(self.device_done.query())  # type: ignore[no-untyped-call]  # untyped in torch

    def take_result(self) -> Any:
        """The result, or what went wrong; only once done. On a GPU the current stream waits for it."""
        if self.error is not None:
            raise self.error
        if self.device_done is not None:
            self.device_done.wait()
        return self.result
