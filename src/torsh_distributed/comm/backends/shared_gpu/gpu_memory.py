"""Memory on one GPU that all ranks of a group have mapped: each writes its own part, all read all parts."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from torsh_distributed import events
from torsh_distributed.comm.backends.shared_gpu import cuda_driver
from torsh_distributed.comm.backends.shared_gpu.cuda_driver import HANDLE_BYTES, CudaRefusal
from torsh_distributed.comm.backends.wire import Call, Wire

_log = logging.getLogger(__name__)

SLOT_BYTES = 32 * 1024 * 1024
"""A rank's part, for each group that exchanges large tensors. Larger ones travel in rounds."""
_GPU_BYTES = 16


class GpuMemory:
    """The parts of all ranks, `slots[rank]`, as bytes."""

    def __init__(self, slots: list[Tensor], release: Callable[[], None]) -> None:
        self.slots = slots
        self.close = weakref.finalize(self, release)
        self.close.atexit = False  # the driver does it, and may be gone by then


def map_gpu_memory(host: Wire, device: torch.device, call: Call) -> GpuMemory | None:
    """Memory of all ranks of `host`'s group on the GPU they share; None on all of them if one cannot take part.

    Every rank calls this with its device as the current one. Ranks learn of each other's failures, so all take the
    same way: that of the host's memory where this one is closed (another GPU, a container or MIG without IPC, no room).
    """
    opened: list[int] = []
    own, problem = 0, ""
    try:
        torch.cuda.current_stream(device).synchronize()  # the driver needs torch's context in this thread
        own = _allocated()
        handle = cuda_driver.handle_of(own)
    except CudaRefusal as error:
        handle, problem = bytes(HANDLE_BYTES), str(error)
    offers = _gather(host, bytes([not problem]) + _identity(device) + handle, call)
    if all(offer[0] for offer in offers) and len({offer[1 : 1 + _GPU_BYTES] for offer in offers}) == 1:
        try:
            for rank, offer in enumerate(offers):
                opened.append(own if rank == host.rank else cuda_driver.open_handle(offer[1 + _GPU_BYTES :]))
        except CudaRefusal as error:
            problem = str(error)
    else:
        problem = problem or "the ranks of the group are on different GPUs, or one has no memory left to share"
    is_mapped = len(opened) == len(offers)
    everywhere = all(flag[0] for flag in _gather(host, bytes([is_mapped]), call))
    others = [address for rank, address in enumerate(opened) if rank != host.rank]
    release = _releaser(own, others)
    if not everywhere:
        release()
        reason = problem or "another rank cannot map the memory"
        _log.info("ranks on this GPU exchange tensors through the host's memory: %s", reason)
        events.emit(events.DecisionEvent(subject="exchange on a shared GPU", choice="host memory", reason=reason))
        return None
    with torch.inference_mode(False):  # collectives of both modes write to them
        return GpuMemory([_as_tensor(address, device) for address in opened], release)


def _allocated() -> int:
    try:
        return cuda_driver.allocate(SLOT_BYTES)
    except CudaRefusal:
        torch.cuda.empty_cache()  # what torch holds but does not use
        return cuda_driver.allocate(SLOT_BYTES)


def _releaser(own: int, others: list[int]) -> Callable[[], None]:
    pid = os.getpid()

    def release() -> None:
        if os.getpid() != pid:
            return  # in a forked child everything belongs to the parent
        for address in others:
            with contextlib.suppress(CudaRefusal):  # the driver is going down, and takes the mapping with it
                cuda_driver.close_handle(address)
        if own:
            with contextlib.suppress(CudaRefusal):
                cuda_driver.free(own)

    return release


def _identity(device: torch.device) -> bytes:
    """Equal for ranks on one GPU, whatever number each process gives it."""
    return hashlib.sha256(str(torch.cuda.get_device_properties(device).uuid).encode()).digest()[:_GPU_BYTES]


def _gather(host: Wire, mine: bytes, call: Call) -> list[bytes]:
    """Every rank's bytes, of the same length."""
    source = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    outputs = [torch.empty_like(source) for _ in range(host.num_ranks)]
    host.all_gather(outputs, source, call)
    return [bytes(output.tolist()) for output in outputs]


class _DeviceBytes:
    """How CUDA libraries of Python hand memory to each other."""

    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (SLOT_BYTES,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _as_tensor(address: int, device: torch.device) -> Tensor:
    return torch.as_tensor(_DeviceBytes(address), device=device)
