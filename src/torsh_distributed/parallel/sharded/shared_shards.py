"""Shards that lie in memory the ranks of a node share: together they are the whole parameter, and nothing is gathered.

FSDP2 copies each shard into a buffer, gathers the buffers and copies the result out, in forward and again in backward.
Here the shards of a parameter lie one after the other in one piece of memory, so a whole parameter is a view of it, and
a gather is no more than a meeting of the ranks. FSDP2 is told so through its own extension of all-gather.

A rank writes its shard when it updates it, and the others read it in forward and backward: these must not meet. After a
gather all earlier updates are there. Before an update all are done with reading, for gradients are reduced after the
last use of a parameter; and because a forward may have no backward, the ranks also meet where it ends.

What gives a parameter other memory, as `to` and loading with `assign` do, is brought back before the next forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from torsh_distributed.comm.collectives.tensors import barrier
from torsh_distributed.comm.shared_memory import shared_memory
from torsh_distributed.errors import InvalidArgument

_ALIGNMENT = 64


def share_shards(model: nn.Module, group: dist.ProcessGroup) -> bool:
    """Move the shards into shared memory, where all ranks of `group` are on one node; says whether it was done.

    Every rank calls this, after `fully_shard` and before the first forward.
    """
    params = {
        name: param for name, param in model.named_parameters() if isinstance(param, DTensor) and _is_even(param, group)
    }
    sizes = [-(-param.numel() * param.element_size() // _ALIGNMENT) * _ALIGNMENT for param in params.values()]
    memory = shared_memory(sum(sizes), group)
    if memory is None:
        return False
    start, shards = 0, []
    for (path, param), size in zip(params.items(), sizes, strict=True):
        shard = _move(param, memory[start : start + param.numel() * param.element_size()], group)
        owner, _, name = path.rpartition(".")
        shards.append((model.get_submodule(owner), name, shard))
        start += size
    bring_back = _SharedShards(shards).bring_back

    def meet(*_: object) -> None:
        barrier(group=group)

    # The compiler leaves these alone, as it does FSDP2's hooks: a meeting happens, and is not traced.
    untraced: Callable[..., Any] = torch.compiler.disable
    model.register_forward_pre_hook(untraced(bring_back), prepend=True)  # before FSDP2 gathers
    model.register_forward_hook(untraced(meet))
    return True


class _SharedShards:
    """Where the shards belong: what has become of them goes back into the memory that all ranks read."""

    def __init__(self, shards: list[tuple[nn.Module, str, Tensor]]) -> None:
        self._shards = shards
        self._has_run = False

    def bring_back(self, *_: object) -> None:
        """Before each forward."""
        self._shards = [one for one in self._shards if self._is_back(*one)]
        self._has_run = True

    def _is_back(self, module: nn.Module, name: str, shard: Tensor) -> bool:
        """Whether the parameter's values are in the shard; if not, it is not shared any more."""
        param = module._parameters.get(name)
        if not isinstance(param, DTensor) or param._local_tensor is shard:  # whole at the moment, or as it was
            return True
        local = param._local_tensor.detach()
        if (local.shape, local.dtype, local.device) == (shard.shape, shard.dtype, shard.device):
            shard.copy_(local)
            param._local_tensor = shard
            return True
        if self._has_run:  # FSDP2 has settled what it gathers, and would go on computing with the old values
            raise InvalidArgument(
                f"a sharded parameter cannot change its dtype or shape after the first forward: {name}",
                hint="convert the model before it is sharded",
                was=f"{tuple(shard.shape)} {shard.dtype}",
                became=f"{tuple(local.shape)} {local.dtype}",
            )
        return False


def _is_even(param: DTensor, group: dist.ProcessGroup) -> bool:
    """Whether the ranks of `group` hold equal numbers of its rows, which then lie as in the whole parameter."""
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


def _move(param: DTensor, memory: memoryview, group: dist.ProcessGroup) -> Tensor:
    """Put this rank's part of a parameter into its place in the memory; returns it."""
    local = param.to_local().detach()
    own = memory[group.rank() * local.nbytes : (group.rank() + 1) * local.nbytes]
    shard = torch.frombuffer(own, dtype=param.dtype).view(local.shape)
    shard.copy_(local)
    before, after = _extensions(torch.frombuffer(memory, dtype=param.dtype).view(param.shape))
    # FSDP2 looks for these two on the local tensor, at the first forward, and keeps the tensor object as it is.
    shard.fsdp_pre_all_gather = before  # type: ignore[attr-defined]
    shard.fsdp_post_all_gather = after  # type: ignore[attr-defined]
    # They mean nothing in another process: a pickle is that of the values alone.
    shard.__getstate__ = dict  # type: ignore[method-assign]
    param._local_tensor = shard
    return shard


def _extensions(whole: Tensor) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What FSDP2 calls before and after it gathers a parameter of which every rank sees all shards."""
    # FSDP2 cannot gather less than a number from each rank; it is the meeting that counts.
    inputs = (whole.new_zeros(1),)

    def before(mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], None]:
        return inputs, None

    def after(
        outputs: Sequence[Tensor], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        # The second is what FSDP2 frees when the parameter is no longer needed: nothing.
        return None if out is not None else (whole, ())

    # FSDP2 asks for the signature at every gather; worked out each time it takes longer than the meeting.
    before.__signature__ = inspect.signature(before)  # type: ignore[attr-defined]
    return before, after
