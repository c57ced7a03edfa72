"""The five functions of CUDA's driver that give one process's GPU memory to another; torch exports none of them.

Why not torch's own way of sharing storages: it counts references in files of /dev/shm, which a killed rank leaves
behind, and warns at exit about ranks that leave before others. Memory taken here does not depend on how torch's
allocator is set up either.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

HANDLE_BYTES = 64
_PEER_ACCESS = 1


class CudaRefusal(Exception):
    """What the driver answered instead of success."""


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * HANDLE_BYTES),)


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaRefusal(f"CUDA's driver cannot be loaded: {error}") from error
    address, size = ctypes.c_uint64, ctypes.c_size_t
    library.cuMemAlloc_v2.argtypes = [ctypes.POINTER(address), size]
    library.cuMemFree_v2.argtypes = [address]
    library.cuIpcGetMemHandle.argtypes = [ctypes.POINTER(_Handle), address]
    library.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(address), _Handle, ctypes.c_uint]
    library.cuIpcCloseMemHandle.argtypes = [address]
    library.cuGetErrorString.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    return library


def _call(name: str, *args: Any) -> None:
    code = getattr(_driver(), name)(*args)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise CudaRefusal(f"{name}: {(text.value or b'unknown error').decode()} ({code})")


def allocate(num_bytes: int) -> int:
    """The address of new memory on the current GPU, outside torch's allocator."""
    address = ctypes.c_uint64()
    _call("cuMemAlloc_v2", ctypes.byref(address), num_bytes)
    return address.value


def free(address: int) -> None:
    """Give back what `allocate` gave."""
    _call("cuMemFree_v2", address)


def handle_of(address: int) -> bytes:
    """What another process of this node opens to reach the memory."""
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
    return bytes(handle.bytes)


def open_handle(handle: bytes) -> int:
    """The address, in this process, of another process's memory."""
    address = ctypes.c_uint64()
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), _PEER_ACCESS)
    return address.value


def close_handle(address: int) -> None:
    """Leave memory that `open_handle` gave."""
    _call("cuIpcCloseMemHandle", address)
