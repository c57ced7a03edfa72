"""Which implementation of the arithmetic a tensor gets: compiled C, Triton, or torch's operators."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

from torch import Tensor

from torsh_distributed.compress.kernels.base import Kernels
from torsh_distributed.compress.kernels.native_kernels import NativeKernels
from torsh_distributed.compress.kernels.torch_kernels import TorchKernels
from torsh_distributed.native import CODEC_KERNELS, load


def kernels_for(tensor: Tensor) -> Kernels:
    """The fastest implementation for the device of `tensor`. The one place that decides."""
    found = {"cpu": compiled_kernels, "cuda": triton_kernels}.get(tensor.device.type, lambda: None)()
    return found or TorchKernels()


@functools.cache
def triton_kernels() -> Kernels | None:
    """The kernels for CUDA, or None without Triton, which comes with torch's wheels for CUDA."""
    if importlib.util.find_spec("triton") is None:
        return None
    from torsh_distributed.compress.kernels.triton_kernels import TritonKernels

    return TritonKernels()


@functools.cache
def compiled_kernels() -> NativeKernels | None:
    """The compiled kernels, or None where they were not built."""
    module = compiled_module()
    return None if module is None else NativeKernels(module)


def compiled_module() -> Any | None:
    """The compiled extension module, or None where it was not built."""
    return load(CODEC_KERNELS)
