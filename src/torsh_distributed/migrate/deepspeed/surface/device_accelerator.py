"""`deepspeed.accelerator.get_accelerator()`: the device of this process, by DeepSpeed's methods."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, MutableMapping
from typing import Any

import torch

from torsh_distributed import known_variables
from torsh_distributed.migrate.deepspeed.surface import op_builders

_TENSOR_TYPES = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}


class TorshAccelerator:
    """CUDA where there is one, else the CPU, whose devices are its cores.

    Everything else that scripts ask for is what torch's module for the device has.
    """

    def __init__(self) -> None:
        self._is_cuda = torch.cuda.is_available()
        self._name = "cuda" if self._is_cuda else "cpu"
        self._communication_backend_name = self.communication_backend_name()
        self._compile_backend = "inductor"
        for name, dtype in _TENSOR_TYPES.items():
            on_gpu = functools.partial(torch.tensor, dtype=dtype, device="cuda")
            setattr(self, name, on_gpu if self._is_cuda else getattr(torch, name))

    def device_name(self, device_index: int | None = None) -> str:
        """`cuda:0`, or `cpu`."""
        return f"cuda:{device_index}" if self._is_cuda and device_index is not None else self._name

    def device(self, device_index: int | None = None) -> Any:
        """A context in which this device is the present one."""
        return torch.cuda.device(device_index) if self._is_cuda else contextlib.nullcontext()

    def is_available(self) -> bool:
        """There is always a CPU."""
        return True

    def is_synchronized_device(self) -> bool:
        """Whether operations are done when they return."""
        return not self._is_cuda

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def device_count(self) -> int:
        """GPUs, or cores; LOCAL_SIZE overrides the latter."""
        if self._is_cuda:
            return torch.cuda.device_count()
        return known_variables.whole_number("LOCAL_SIZE") or os.cpu_count() or 1

    def current_device(self) -> int:
        """The present GPU; for a CPU the local rank."""
        return torch.cuda.current_device() if self._is_cuda else known_variables.whole_number("LOCAL_RANK")

    def current_device_name(self) -> str:
        """The present device by name."""
        return self.device_name(self.current_device() if self._is_cuda else None)

    def set_device(self, device_index: int) -> None:
        """Make a GPU the present one."""
        if self._is_cuda:
            torch.cuda.set_device(device_index)

    def communication_backend_name(self) -> str:
        """The backend that `init_distributed` brings up."""
        return "nccl" if self._is_cuda else "torsh"

    def is_bf16_supported(self) -> bool:
        """Whether bf16 works: everywhere but on old GPUs."""
        return torch.cuda.is_bf16_supported() if self._is_cuda else True

    def is_fp16_supported(self) -> bool:
        """Torch computes in fp16 on both."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """The formats a module may have."""
        return [torch.float32, torch.float16, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for the device."""
        if self._is_cuda:
            torch.cuda.synchronize(device_index)

    def empty_cache(self) -> None:
        """Give unused memory back."""
        if self._is_cuda:
            torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes in use on the GPU; on a CPU those of this process."""
        return torch.cuda.memory_allocated(device_index) if self._is_cuda else _resident_bytes()

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The most bytes in use so far."""
        return torch.cuda.max_memory_allocated(device_index) if self._is_cuda else _peak_bytes()

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Bytes that torch holds."""
        return torch.cuda.memory_reserved(device_index) if self._is_cuda else _resident_bytes()

    memory_cached = memory_reserved

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """The most bytes that torch held so far."""
        return torch.cuda.max_memory_reserved(device_index) if self._is_cuda else _peak_bytes()

    max_memory_cached = max_memory_reserved

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Forget the peak; a process's peak cannot be."""
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats(device_index)

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """What the allocator counts."""
        return dict(torch.cuda.memory_stats(device_index)) if self._is_cuda else {}

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device."""
        if self._is_cuda:
            return int(torch.cuda.get_device_properties(device_index or 0).total_memory)
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes that are free."""
        if self._is_cuda:
            return int(torch.cuda.mem_get_info(device_index)[0])
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")

    def manual_seed(self, seed: int) -> None:
        """Seed the device's generator."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        """The seed of the device's generator."""
        return torch.initial_seed()

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """The state of the device's generator."""
        return torch.cuda.get_rng_state() if self._is_cuda else torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Set the state of the device's generator."""
        if self._is_cuda:
            torch.cuda.set_rng_state(new_state)
        else:
            torch.set_rng_state(new_state)

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """The tensor in pinned memory, where there is a GPU."""
        return tensor.pin_memory() if self._is_cuda else tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether it is in pinned memory."""
        return self._is_cuda and tensor.is_pinned()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether it is on this kind of device."""
        return tensor.device.type == self._name

    def range_push(self, message: str) -> None:
        """Begin a range of the profiler."""
        if self._is_cuda:
            torch.cuda.nvtx.range_push(message)  # type: ignore[no-untyped-call]  # untyped in torch

    def range_pop(self) -> None:
        """End it."""
        if self._is_cuda:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]  # untyped in torch

    def is_triton_supported(self) -> bool:
        """None of DeepSpeed's kernels is used."""
        return False

    prefer_triton_grouped_mm = is_triton_supported

    def is_fp64_supported(self) -> bool:
        """Torch computes in fp64 on both."""
        return True

    def random(self) -> Any:
        """Torch's module of random numbers."""
        return torch.random

    def default_generator(self, device_index: int) -> torch.Generator:
        """The generator that random numbers of the device come from."""
        return torch.cuda.default_generators[device_index] if self._is_cuda else torch.default_generator

    def default_stream(self, device_index: int | None = None) -> Any:
        """The stream that work runs on unless told otherwise."""
        return torch.cuda.default_stream(device_index) if self._is_cuda else torch.cpu.current_stream()

    @property
    def Event(self) -> Any:  # noqa: N802 (torch's name)
        """Torch's class of events; a CPU has none."""
        return torch.cuda.Event if self._is_cuda else None

    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        """Forget the peak; a process's peak cannot be."""
        self.reset_peak_memory_stats(device_index)

    reset_max_memory_cached = reset_max_memory_allocated

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Call it now: nothing is initialized late here."""
        return callback()

    def is_current_stream_capturing(self) -> bool:
        """Whether a CUDA graph is being recorded."""
        return self._is_cuda and torch.cuda.is_current_stream_capturing()

    def create_graph(self) -> Any:
        """A CUDA graph to record into; None on a CPU."""
        return torch.cuda.CUDAGraph() if self._is_cuda else None

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        """A context whose work is recorded; on a CPU it runs."""
        return torch.cuda.graph(graph, pool, stream) if self._is_cuda else contextlib.nullcontext()

    def replay_graph(self, graph: Any) -> None:
        """Run what was recorded."""
        if graph is not None:
            graph.replay()

    def pin_memory_alignment(self) -> int:
        """Torch aligns pinned memory itself."""
        return 1

    def pin_empty(self, *size: Any, dtype: torch.dtype | None = None, **_: object) -> torch.Tensor:
        """An empty tensor in host memory, pinned where there is a GPU."""
        return torch.empty(*size, dtype=dtype, pin_memory=self._is_cuda)

    def pin_empty_like(self, tensor: torch.Tensor, **_: object) -> torch.Tensor:
        """An empty tensor of the same shape in host memory, pinned where there is a GPU."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._is_cuda)

    def unpin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in memory that is not pinned."""
        return tensor.clone() if self.is_pinned(tensor) else tensor

    def register_host_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, for transfers: pinned where there is a GPU."""
        return self.pin_memory(tensor)

    def unregister_host_memory(self, tensor: torch.Tensor) -> None:
        """Torch frees pinned memory with the tensor."""

    def export_envs(self) -> list[str]:
        """Beginnings of variables that workers need."""
        return ["NCCL", "PYTHON", "MV2", "UCX", "TORSH", "LD_LIBRARY", "PATH"]

    def visible_devices_envs(self) -> list[str]:
        """The variable that says which GPUs a process sees."""
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, current_env: MutableMapping[str, str], local_accelerator_ids: list[int]) -> None:
        """Write it."""
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def get_compile_backend(self) -> str:
        """The backend of torch.compile."""
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Choose the backend that `get_compile_backend` names."""
        known = torch.compiler.list_backends(exclude_tags=())
        if backend not in known:
            raise ValueError(f"{backend} not supported by {self.device_name()}. Supported Backends are {known}")
        self._compile_backend = backend

    def op_builder_dir(self) -> str:
        """The module of the builders."""
        return "deepspeed.ops.op_builder"

    def create_op_builder(self, class_name: str) -> Any:
        """A builder by its name; None if DeepSpeed has none of that name."""
        kind = self.get_op_builder(class_name)
        return None if kind is None else kind()

    def get_op_builder(self, class_name: str) -> Any:
        """The class of a builder."""
        return op_builders.BUILDERS.get(class_name)

    def build_extension(self) -> Any:
        """What compiles extensions of torch."""
        from torch.utils.cpp_extension import BuildExtension

        return BuildExtension

    def __getattr__(self, name: str) -> Any:
        """Streams, events and the like: torch's."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cuda if torch.cuda.is_available() else torch.cpu, name)


_accelerator: TorshAccelerator | None = None


def get_accelerator() -> TorshAccelerator:
    """The one of this process."""
    global _accelerator
    if _accelerator is None:
        _accelerator = TorshAccelerator()
    return _accelerator


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _peak_bytes() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
