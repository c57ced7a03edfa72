"""What a rank asks for: an operation by name, with all that the ranks must agree on."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntFlag, StrEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torsh_distributed import known_variables


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """How operations are packed, remembered and watched."""

    fusion_threshold_bytes: int
    """All-reduces that are ready together share a buffer up to this size."""

    cycle_s: float
    """How long small operations wait for others at most, unless somebody waits for them; 0 passes on each at once."""

    cache_capacity: int
    """Repeated operations that travel as a number; 0 sends every request in full."""

    stall_warning_s: float | None
    """After how long an operation that some ranks have not asked for is reported; None never."""

    stall_shutdown_s: float | None
    """After how long such an operation fails on all ranks; None never."""

    timeout_s: float
    """Time for the ranks of a set to connect."""


def read_settings(environ: Mapping[str, str], *, timeout_s: float) -> EngineSettings:
    """The settings of HOROVOD_FUSION_THRESHOLD and its like; raises ConfigurationError with the variable's name."""
    is_watched = not known_variables.is_on("HOROVOD_STALL_CHECK_DISABLE", environ)
    warning_s = known_variables.number("HOROVOD_STALL_CHECK_TIME_SECONDS", environ)
    shutdown_s = known_variables.number("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", environ)
    if shutdown_s and is_watched and shutdown_s < warning_s:
        warning_s = shutdown_s
    return EngineSettings(
        fusion_threshold_bytes=int(known_variables.number("HOROVOD_FUSION_THRESHOLD", environ)),
        cycle_s=known_variables.number("HOROVOD_CYCLE_TIME", environ) / 1000,
        cache_capacity=int(known_variables.number("HOROVOD_CACHE_CAPACITY", environ)),
        stall_warning_s=warning_s if is_watched and warning_s else None,
        stall_shutdown_s=shutdown_s if is_watched and shutdown_s else None,
        timeout_s=timeout_s,
    )


class OpKind(StrEnum):
    """The operations that ranks negotiate."""

    ALLREDUCE = "allreduce"
    ADASUM = "adasum"
    AVERAGED = "averaged"
    ALLGATHER = "allgather"
    BROADCAST = "broadcast"
    ALLTOALL = "alltoall"
    REDUCESCATTER = "reducescatter"
    BARRIER = "barrier"
    JOIN = "join"
    PROCESS_SET = "process_set"

    # Enum's own hash is a Python function, and every operation is looked up by its hash.
    __hash__ = str.__hash__


class RequestFlags(IntFlag):
    """How an operation is carried out, where the ranks have to do the same."""

    NONE = 0
    SHARED = 1
    """The tensor stays where it is from one call to the next, so the ranks may reduce it in shared memory."""


class Request(NamedTuple):
    """One operation of one rank. Equal requests of all ranks are one operation; a plain tuple, because it travels."""

    name: str
    kind: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """(dtype, shape) of every tensor, in order."""
    op: str = ""
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    """The rank of the world that a broadcast starts from."""
    splits: tuple[int, ...] = ()
    """alltoall: rows for each rank; a process set: its ranks; a bucket of gradients: a sum over its names."""
    device: str = "cpu"
    flags: int = 0

    @property
    def num_bytes(self) -> int:
        """The size of the values of all tensors."""
        return _num_bytes(self.tensors)

    def zeros(self, device: torch.device) -> list[Tensor]:
        """What a rank that has joined contributes."""
        return [torch.zeros(shape, dtype=DTYPES[dtype], device=device) for dtype, shape in self.tensors]


_NAMES = (
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "bool",
    "complex64",
    "complex128",
)
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES}
"""Dtypes by the names that travel."""
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


@functools.lru_cache(maxsize=4096)
def _num_bytes(tensors: tuple[tuple[str, tuple[int, ...]], ...]) -> int:
    return sum(DTYPES[dtype].itemsize * math.prod(shape) for dtype, shape in tensors)


def described(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    """A tensor as a request names it."""
    return DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)


def request_from_wire(parts: Any) -> Request:
    """The request in a decoded message. Any: foreign data; every member of the job sends these."""
    return Request(*parts)


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
