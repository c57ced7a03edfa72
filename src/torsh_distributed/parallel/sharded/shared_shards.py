"""Shards in memory that the ranks of a node share: together they form the whole parameter, so nothing is gathered.

FSDP2 copies each shard into a buffer, gathers the buffers and copies the result out, in forward and again in backward.
Here the shards of a parameter are adjacent in one block of memory, so a whole parameter is a view of it, and a gather
is only a synchronization of the ranks. FSDP2's all-gather extension makes this possible.

A rank writes its shard when it updates it, and the others read it in forward and backward: these must not overlap.
After a gather all earlier updates are visible. Before an update all ranks have finished reading, because gradients are
reduced after the last use of a parameter; and since a forward may have no backward, the ranks also synchronize at its
end.

A parameter that was given other memory, as `to` and loading with `assign` do, is moved back before the next forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from torsh_distributed.comm.collectives.moves import barrier
from torsh_distributed.comm.shared_memory.buffers import allocate_memory_file, allocate_shared_memory
from torsh_distributed.comm.shared_memory.memory_file import MemoryFile
from torsh_distributed.errors import InvalidArgument


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


_ALIGNMENT = 64


def share_shards(model: nn.Module, group: dist.ProcessGroup) -> bool:
    """Move the shards into shared memory if all ranks of `group` are on one node; returns whether it did.

    Every rank calls this, after `fully_shard` and before the first forward.
    """
    params = _even_params(model, group)
    memory = allocate_shared_memory(sum(map(_room, params.values())), group)
    if memory is not None:
        _move_all(model, params, memory, group, has_values=True)
    return memory is not None


def place_shards(model: nn.Module, group: dist.ProcessGroup) -> MemoryFile | None:
    """The same for shards without values: only their places are taken, and the values are written there later."""
    params = _even_params(model, group)
    file = allocate_memory_file(sum(map(_room, params.values())), group)
    if file is not None:
        _move_all(model, params, file.memory, group, has_values=False)
    return file


def _even_params(model: nn.Module, group: dist.ProcessGroup) -> dict[str, DTensor]:
    return {
        name: param for name, param in model.named_parameters() if isinstance(param, DTensor) and _is_even(param, group)
    }


def _room(param: DTensor) -> int:
    return -(-param.numel() * param.element_size() // _ALIGNMENT) * _ALIGNMENT


def _move_all(
    model: nn.Module, params: dict[str, DTensor], memory: memoryview, group: dist.ProcessGroup, *, has_values: bool
) -> None:
    """Give the parameters their places, one after the other, and the model the hooks that keep them there."""
    start, shards = 0, []
    for path, param in params.items():
        shard = _move(param, memory[start : start + param.numel() * param.element_size()], group, has_values)
        owner, _, name = path.rpartition(".")
        shards.append((model.get_submodule(owner), name, shard))
        start += _room(param)
    bring_back = FixedShards(shards).bring_back

    def meet(*_: object) -> None:
        barrier(group=group)

    # The compiler must not trace these, as with FSDP2's hooks: a barrier has to happen.
    untraced: Callable[..., Any] = torch.compiler.disable
    model.register_forward_pre_hook(untraced(bring_back), prepend=True)  # before FSDP2 gathers
    model.register_forward_hook(untraced(meet))


class FixedShards:
    """Shards with places of their own, as in shared memory; moves parameters back that were given other memory."""

    def __init__(self, shards: list[tuple[nn.Module, str, Tensor]]) -> None:
        self._shards = shards
        self._has_run = False

    def bring_back(self, *_: object) -> None:
        """Called before each forward."""
        self._shards = [one for one in self._shards if self._is_back(*one)]
        self._has_run = True

    def _is_back(self, module: nn.Module, name: str, shard: Tensor) -> bool:
        """Whether the parameter's values are in the shard; if not, it is no longer shared."""
        param = module._parameters.get(name)
        if not isinstance(param, DTensor) or param._local_tensor is shard:  # gathered now, or unchanged
            return True
        local = param._local_tensor.detach()
        if (local.shape, local.dtype, local.device) == (shard.shape, shard.dtype, shard.device):
            shard.copy_(local)
            param._local_tensor = shard
            return True
        if self._has_run:  # FSDP2 has fixed what it gathers, and would keep computing with the old values
            raise InvalidArgument(
                f"a sharded parameter cannot change its dtype or shape after the first forward: {name}",
                hint="convert the model before it is sharded",
                was=f"{tuple(shard.shape)} {shard.dtype}",
                became=f"{tuple(local.shape)} {local.dtype}",
            )
        return False


def _is_even(param: DTensor, group: dist.ProcessGroup) -> bool:
    """Whether the ranks of `group` hold equal numbers of its rows, in the order of the whole parameter."""
    *replicas, cut = param.placements
    return (
        param.device.type == "cpu"
        and param.device_mesh.get_group(param.device_mesh.ndim - 1) is group
        and type(cut) is Shard
        and cut.dim == 0
        and all(isinstance(one, Replicate) for one in replicas)
        and param.shape[0] % group.size() == 0
        and param.numel() > 0
    )


def _move(param: DTensor, memory: memoryview, group: dist.ProcessGroup, has_values: bool) -> Tensor:
    """Copy this rank's part of a parameter into the shared memory; returns it."""
    local = param.to_local().detach()
    own = memory[group.rank() * local.nbytes : (group.rank() + 1) * local.nbytes]
    shard = torch.frombuffer(own, dtype=param.dtype).view(local.shape)
    if has_values:
        shard.copy_(local)
    before, after = _extensions(torch.frombuffer(memory, dtype=param.dtype).view(param.shape))
    # FSDP2 looks for these two on the local tensor at the first forward, and keeps the tensor object.
    shard.fsdp_pre_all_gather = before  # type: ignore[attr-defined]
    shard.fsdp_post_all_gather = after  # type: ignore[attr-defined]
    # They are meaningless in another process: pickle only the values.
    shard.__getstate__ = dict  # type: ignore[method-assign]
    param._local_tensor = shard
    return shard


def _extensions(whole: Tensor) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The functions FSDP2 calls before and after it gathers a parameter whose shards every rank can read."""
    # FSDP2 must gather at least one number from each rank; only the synchronization matters.
    inputs = (whole.new_zeros(1),)

    def before(mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], None]:
        return inputs, None

    def after(
        outputs: Sequence[Tensor], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        # The second is what FSDP2 frees when the parameter is no longer needed: nothing.
        return None if out is not None else (whole, ())

    # FSDP2 asks for the signature at every gather; computing it takes longer than the synchronization.
    before.__signature__ = inspect.signature(before)  # type: ignore[attr-defined]
    return before, after
