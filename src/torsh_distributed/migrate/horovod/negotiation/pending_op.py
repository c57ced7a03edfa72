"""An operation that this rank has submitted, from the call to its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torsh_distributed.migrate.horovod.negotiation.request import Request


class BucketFacts(NamedTuple):
    """What is reported of an operation that is a bucket of gradients."""

    step: int
    bucket: int
    num_bytes: int
    """Of the gradients, before they are compressed."""
    codec: str | None


class PendingOp:
    """One submitted operation. Filled in by the engine's thread; read after `is_done`.

    What most operations do not need is set on the class, so that making one sets three attributes.
    """

    run: Callable[..., tuple[Any, int]] | None = None
    """For operations that bring their own code: called with the group on the engine's thread; the result, and the bytes
    that this rank sent."""
    bucket: BucketFacts | None = None
    wire_bytes: int | None = None
    """What this rank sent, where that is not what an all-reduce of the tensors sends."""
    finish: Callable[[list[Any]], Any] | None = None
    """What `synchronize` returns, of the results; None for the only one."""
    result: Any = None
    error: BaseException | None = None
    is_done = False
    submitted_s: float | None = None
    """When it was submitted, while a timeline is written."""
    device_ready: torch.cuda.Event | None = None
    device_done: torch.cuda.Event | None = None

    def __init__(self, request: Request, inputs: list[Tensor], outputs: list[Tensor] | None = None) -> None:
        self.request = request
        self.inputs = inputs
        self.outputs = outputs
        """Where results go; None makes new tensors."""
        if request.device == "cuda":
            self.device_ready = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped in torch
            self.device_ready.record()

    def is_finished(self) -> bool:
        """Whether waiting would not block."""
        if not self.is_done or self.device_done is None:
            return self.is_done
        return bool(self.device_done.query())  # type: ignore[no-untyped-call]  # untyped in torch

    def take_result(self) -> Any:
        """The results, or what went wrong; only once done. On a GPU the current stream waits for them."""
        if self.error is not None:
            raise self.error
        if self.device_done is not None:
            self.device_done.wait()
        return self.result
