"""Shards that lie in memory the ranks of a node share: together they are the whole parameter, and nothing is gathered.

FSDP2 copies each shard into a buffer, gathers the buffers and copies the result out, in forward and again in backward.
Here the shards of a parameter lie one after the other in one piece of memory, so a whole parameter is a view of it, and
a gather is no more than a meeting of the ranks. FSDP2 is told so through its own extension of all-gather.

A rank writes its shard when it updates it, and the others read it in forward and backward: these must not meet. After a
gather all earlier updates are there. Before an update all are done with reading, for gradients are reduced after the
last use of a parameter; and because a forward may have no backward, the ranks also meet where it ends.
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

from torsh_distributed.comm.collectives import barrier
from torsh_distributed.comm.common import shared_memory

_ALIGNMENT = 64


def share_shards(model: nn.Module, group: dist.ProcessGroup) -> bool:
    """Move the shards into shared memory, where all ranks of `group` are on one node; says whether it was done.

    Every rank calls this, after `fully_shard` and before the first forward.
    """
    params = [param for param in model.parameters() if isinstance(param, DTensor) and _is_even(param, group)]
    sizes = [-(-param.numel() * param.element_size() // _ALIGNMENT) * _ALIGNMENT for param in params]
    memory = shared_memory(sum(sizes), group)
    if memory is None:
        return False
    start = 0
    for param, size in zip(params, sizes, strict=True):
        _move(param, memory[start : start + param.numel() * param.element_size()], group)
        start += size
    model.register_forward_hook(lambda *_: barrier(group=group))
    return True


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


def _move(param: DTensor, memory: memoryview, group: dist.ProcessGroup) -> None:
    local = param.to_local().detach()
    own = memory[group.rank() * local.nbytes : (group.rank() + 1) * local.nbytes]
    shard = torch.frombuffer(own, dtype=param.dtype).view(local.shape)
    shard.copy_(local)
    before, after = _extensions(torch.frombuffer(memory, dtype=param.dtype).view(param.shape))
    # FSDP2 looks for these two on the local tensor, at the first forward, and keeps the tensor object as it is.
    shard.fsdp_pre_all_gather = before  # type: ignore[attr-defined]
    shard.fsdp_post_all_gather = after  # type: ignore[attr-defined]
    param._local_tensor = shard


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
