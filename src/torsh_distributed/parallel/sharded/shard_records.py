"""Records of what a rank holds of a sharded model, and how its bytes are counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, kw_only=True)
class ShardInfo:
    """The part of a parameter that this rank owns."""

    name: str
    dim: int
    """The tensor dim that is sharded."""
    start: int
    """First row of this rank's part along `dim`."""
    size: int
    """Rows of this rank's part; 0 where there are fewer rows than ranks."""
    original_shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class MemoryStats:
    """Bytes this rank holds now, counted from the storages, and what it would hold without sharding."""

    param_bytes: int
    grad_bytes: int
    optimizer_bytes: int
    buffer_bytes: int
    whole_param_bytes: int
    """Bytes of all parameters, as one process would hold them."""
    num_gathers: int
    """Pieces gathered so far."""
    num_reductions: int
    """Pieces whose gradients were reduced so far."""
    peak_device_bytes: int | None
    """Peak bytes of the device's allocator so far; None on a CPU, which does not count them."""

    @property
    def saved_param_bytes(self) -> int:
        """Bytes of parameters that this rank need not hold because others do."""
        return self.whole_param_bytes - self.param_bytes

    @property
    def total_bytes(self) -> int:
        """Parameters, gradients, optimizer state and buffers."""
        return self.param_bytes + self.grad_bytes + self.optimizer_bytes + self.buffer_bytes


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: its shard, or all of it."""
    if isinstance(tensor, DTensor):
        held: Tensor = tensor.to_local()
        return held
    return tensor


def storage_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of the distinct storages behind these tensors."""
    storages = {
        storage.data_ptr(): storage.nbytes() for storage in (local_part(one).untyped_storage() for one in tensors)
    }
    return sum(storages.values())
