"""The backends by name: which exist, what each can do on this machine, and which one `auto` chooses.

Capabilities are probed, not declared: a one-rank group is made and every reduction is tried on every dtype.
"""

from __future__ import annotations

import difflib
import functools
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist

from torsh_distributed.comm.backends.base import TorshProcessGroup
from torsh_distributed.comm.backends.mpi.library import missing_mpi
from torsh_distributed.comm.backends.shm.group import ShmOptions, create_shm_wire
from torsh_distributed.comm.reduce_op import ReduceOp
from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument, first_line

Reductions = frozenset[tuple[ReduceOp, torch.dtype]]

_PROBED_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
)

_PROBE_TIMEOUT = timedelta(seconds=30)
_UNUSED_OF_TORCH = {dist.Backend.UNDEFINED, "mpi", "xccl"}
"""In torch's list of backends, and not in its wheels for Linux."""


def probe_reductions(group: Any, device: str = "cpu") -> Reductions:
    """The pairs that all_reduce of a one-rank group takes.

    Any: torch's stubs do not derive its groups from ProcessGroup.
    """
    found = set()
    for op in ReduceOp:
        for dtype in _PROBED_DTYPES:
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp(op.to_torch())
            try:
                group.allreduce([torch.ones(2, device=device).to(dtype)], options).wait()
            except (RuntimeError, TypeError, ValueError):
                continue  # this pair is refused: that is the answer the probe is after
            found.add((op, dtype))
    return frozenset(found)


@functools.cache
def gloo_reductions() -> Reductions:
    """What gloo takes, tried in a group outside torch's registry, so probing leaves no trace."""
    return probe_reductions(dist.ProcessGroupGloo(dist.HashStore(), 0, 1, _PROBE_TIMEOUT))


def registered_backends() -> tuple[str, ...]:
    """The backends of other packages that this process has registered with torch, by the names they chose."""
    known = {kind.value for kind in BackendType} | _UNUSED_OF_TORCH
    return tuple(name for name in dist.Backend.backend_list if name not in known)


class BackendType(StrEnum):
    """The libraries that move bytes. `MPI` is real MPI through mpi4py: torch's wheels carry none."""

    NCCL = "nccl"
    GLOO = "gloo"
    SHM = "shm"
    TORSH = "torsh"
    MPI = "mpi4py"
    UCC = "ucc"
    FAKE = "fake"

    @classmethod
    def parse(cls, name: str) -> BackendType:
        """The backend of that name, or InvalidArgument with the nearest one: never a silent substitute."""
        try:
            return cls(name.lower())
        except ValueError:
            names = [*(kind.value for kind in cls), *registered_backends()]
            near = difflib.get_close_matches(name.lower(), names, n=1)
            raise InvalidArgument(
                "unknown backend",
                hint=f"did you mean {near[0]!r}?"
                if near
                else f"use 'auto' or one of: {', '.join(names)}; another package's is known once it is imported:"
                " distributed.backend_module in a plan",
                backend=name,
            ) from None


@dataclass(frozen=True, kw_only=True)
class BackendCapabilities:
    """What a backend can do on this machine, found by trying."""

    backend: BackendType
    is_available: bool
    reason: str
    """Why it is not available; empty if it is."""
    devices: tuple[str, ...] = ()
    reductions: Reductions = frozenset()
    """The pairs that all_reduce takes; empty where it could not be tried (no such device here)."""
    is_asynchronous: bool | None = None
    """Whether a collective returns before the other rank has called it; None where it could not be tried."""
    has_messages: bool | None = None
    """Whether two ranks can exchange a tensor; None where it could not be tried."""

    def supports(self, op: ReduceOp, dtype: torch.dtype) -> bool:
        """Whether all_reduce takes this pair."""
        return (op, dtype) in self.reductions


def is_available() -> bool:
    """Whether torch was built with distributed support at all."""
    return dist.is_available()


def why_unavailable(backend: BackendType) -> str:
    """What is missing for this backend, or an empty string; checks torch and the devices."""
    if not dist.is_available():
        return "torch was built without distributed support"
    if backend is BackendType.NCCL:
        if not dist.is_nccl_available():
            return "this torch was built without NCCL"
        return "" if torch.cuda.is_available() else "no CUDA device is visible"
    if backend is BackendType.GLOO:
        return "" if dist.is_gloo_available() else "this torch was built without gloo"
    if backend is BackendType.UCC:
        return "" if dist.is_ucc_available() else "this torch was built without UCC"
    if backend is BackendType.MPI:
        return missing_mpi()
    if backend in (BackendType.SHM, BackendType.TORSH):
        return "" if sys.platform == "linux" else "shared memory between ranks works on Linux only"
    return ""


def choose_backend(name: str = "auto", *, device_type: str | None = None) -> str:
    """The backend to use: `auto` gives nccl where a CUDA device is used and torsh on the CPU.

    A per-device form such as "cpu:gloo,cuda:nccl" is checked part by part and returned as it is. A name that another
    package has registered with torch is taken as it is.
    Raises FeatureNotAvailable, with what is missing, if the chosen one cannot work here.
    """
    if name == "auto":
        device = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
        name = "cpu:gloo,cuda:nccl" if device == "cuda" else "torsh"
    for part in name.split(","):
        if part.split(":")[-1].strip().lower() in registered_backends():
            continue
        backend = BackendType.parse(part.split(":")[-1].strip())
        missing = why_unavailable(backend)
        if missing:
            raise FeatureNotAvailable(
                f"the {backend.value} backend cannot be used here: {missing}",
                hint="use backend='auto' to take the best one this machine has",
                backend=backend.value,
            )
    return name


def why_unusable(name: str) -> str:
    """Why `choose_backend` refuses a name in this process; empty if it does not."""
    try:
        choose_backend(name)
    except (FeatureNotAvailable, InvalidArgument) as error:
        return first_line(error)
    return ""


@functools.cache
def probe_capabilities(backend: BackendType | str) -> BackendCapabilities:
    """Try every reduction on every dtype in a group of one rank, and a collective and a message between two.

    The two are threads of this process, so of nccl and MPI, which want a process for each, it stays unknown. Size
    limits are not looked for: that takes a tensor of the size.
    """
    backend = BackendType.parse(backend)
    missing = why_unavailable(backend)
    if missing:
        return BackendCapabilities(backend=backend, is_available=False, reason=missing)
    devices = tuple(dist.Backend.backend_capability.get(backend.value, []))
    is_asynchronous, has_messages = _tried_by_two(backend)
    return BackendCapabilities(
        backend=backend,
        is_available=True,
        reason="",
        devices=devices,
        reductions=_reductions(backend),
        is_asynchronous=is_asynchronous,
        has_messages=has_messages,
    )


def _reductions(backend: BackendType) -> Reductions:
    """What a group of one rank takes, outside torch's registry; empty where that has no meaning."""
    if backend is BackendType.GLOO:
        return gloo_reductions()
    if backend in (BackendType.SHM, BackendType.TORSH):
        store, limit = dist.HashStore(), _PROBE_TIMEOUT
        wire = create_shm_wire(store, rank=0, num_ranks=1, timeout=limit, options=ShmOptions())
        return probe_reductions(TorshProcessGroup(store, wire, limit))
    if backend is BackendType.NCCL:
        group = dist.ProcessGroupNCCL(dist.HashStore(), 0, 1, dist.ProcessGroupNCCL.Options())
        return probe_reductions(group, "cuda")
    return frozenset()


def _tried_by_two(backend: BackendType) -> tuple[bool | None, bool | None]:
    """Whether collectives are asynchronous, and whether messages arrive, between two ranks of this process."""
    if backend not in (BackendType.GLOO, BackendType.SHM, BackendType.TORSH):
        return None, None
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:  # a group comes up when both of its ranks make it
        one, other = pool.map(lambda rank: _member(backend, store, rank), range(2))
    options = dist.AllreduceOptions()
    options.asyncOp = True
    first = one.allreduce([torch.ones(1)], options)
    is_asynchronous = not first.is_completed()  # else it would have ended without the other rank
    second = other.allreduce([torch.ones(1)], options)
    sent, received = torch.arange(3.0), torch.zeros(3)
    works = [first, second, one.send([sent], 1, 0), other.recv([received], 0, 0)]
    for work in works:
        work.wait()
    return is_asynchronous, torch.equal(sent, received)


def _member(backend: BackendType, store: dist.Store, rank: int) -> Any:
    """A group of two ranks, outside torch's registry. Any: as for `probe_reductions`."""
    if backend is BackendType.GLOO:
        return dist.ProcessGroupGloo(store, rank, 2, _PROBE_TIMEOUT)
    wire = create_shm_wire(store, rank=rank, num_ranks=2, timeout=_PROBE_TIMEOUT, options=ShmOptions())
    return TorshProcessGroup(store, wire, _PROBE_TIMEOUT)
