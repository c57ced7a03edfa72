"""Divides the optimizer's update among the replicas on one node: each rank updates a part, in all replicas.

In plain data parallelism every rank does the same whole update. With shared memory it is done once: a rank updates its
part of each parameter and writes the result to its own replica and, while it is in the cache, to the others. The
optimizer's state exists once for all ranks, which all see it whole.

A replica still belongs to its rank: other ranks do not see what the rank itself does to its parameters. Others write to
it only during an update, with a barrier before and after, so no rank is still reading.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_distributed.comm.collectives.moves import barrier
from torsh_distributed.comm.shared_memory.buffers import allocate_shared_memory
from torsh_distributed.errors import InvalidArgument, TorshError

_LINE_BYTES = 64


@dataclass(frozen=True)
class _SharedParam:
    """A parameter of this rank's replica and its state in shared memory, and the elements this rank updates."""

    value: Tensor
    address: int
    state: Mapping[str, Tensor]
    part: slice


class DividedUpdate:
    """Shared memory for equal replicas of fp32 parameters on the ranks of a node, and which rank updates what.

    `state` names the optimizer's per-element state, in tensors shaped like the parameter.
    """

    def __init__(
        self, params: Iterable[Tensor], state: tuple[str, ...], group: dist.ProcessGroup, memory: memoryview
    ) -> None:
        rank, num_ranks = group.rank(), group.size()
        replica_bytes = len(memory) // (num_ranks + len(state))
        self._group = group
        self._shared: dict[Tensor, _SharedParam] = {}
        self.distances = [(other - rank) * replica_bytes for other in range(num_ranks) if other != rank]
        """Bytes from an element of this rank's replica to the same element of each other replica."""
        start = 0
        for param in params:
            value, *kept = (
                _tensor(memory[region * replica_bytes + start :], param)
                for region in (rank, *range(num_ranks, num_ranks + len(state)))
            )
            part = _part(param.numel(), rank, num_ranks)
            self._shared[param] = _SharedParam(value, value.data_ptr(), dict(zip(state, kept, strict=True)), part)
            start += _whole_lines(param)
        self._move_back()

    @classmethod
    def of(cls, params: Iterable[Tensor], state: tuple[str, ...], group: dist.ProcessGroup) -> Self | None:
        """For those of `params` that can be divided, or None if none can; every rank of the group calls this."""
        if group.size() == 1:
            return None
        dividable = _dividable(list(params))
        memory = allocate_shared_memory(sum(map(_whole_lines, dividable)) * (group.size() + len(state)), group)
        return None if memory is None else cls(dividable, state, group, memory)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Around an update of all ranks: no rank reads what others write, and afterwards everything is written."""
        self._move_back()
        barrier(group=self._group)
        yield
        try:
            barrier(group=self._group)
        except TorshError as error:
            error.add_note(
                "The update was interrupted, and some parameters were not updated: resume from a checkpoint."
            )
            raise

    def part(self, param: Tensor, state: MutableMapping[str, Any]) -> slice | None:
        """The elements that this rank updates, their state moved to shared memory; None for all, as if alone."""
        shared = self._shared.get(param)
        if shared is None:
            return None
        for name, home in shared.state.items():
            held = state[name]
            if held is not home:  # new or loaded, equal on all ranks: each copies the part it will update
                home.view(-1)[shared.part] = held.reshape(-1)[shared.part]
                state[name] = home
        return shared.part

    def _move_back(self) -> None:
        """Move parameters back that were given other memory, as `to` and `share_memory_` do."""
        for param, shared in self._shared.items():
            if param.data_ptr() == shared.address:
                continue
            if (param.shape, param.dtype, param.device) != (
                shared.value.shape,
                shared.value.dtype,
                shared.value.device,
            ):
                raise InvalidArgument(
                    "a parameter cannot change its shape, dtype or device once the ranks of a node update it together",
                    hint="convert the model before parallelize()",
                    was=f"{tuple(shared.value.shape)} {shared.value.dtype} on {shared.value.device}",
                    became=f"{tuple(param.shape)} {param.dtype} on {param.device}",
                )
            shared.value.copy_(param.detach())
            param.data = shared.value


def _dividable(params: list[Tensor]) -> list[Tensor]:
    """Whole fp32 parameters in host memory that share no storage; the same on all ranks of equal replicas."""
    owners: dict[int, int] = {}
    for param in params:
        if not hasattr(param, "to_local"):
            address = param.untyped_storage().data_ptr()
            owners[address] = owners.get(address, 0) + 1
    return [
        param
        for param in params
        if param.requires_grad
        and param.numel() > 0
        and not hasattr(param, "to_local")  # a shard
        and (param.device.type, param.dtype) == ("cpu", torch.float32)
        and param.is_contiguous()
        and owners[param.untyped_storage().data_ptr()] == 1
    ]


def _whole_lines(param: Tensor) -> int:
    """Its bytes rounded up to whole cache lines, so no two parameters share one."""
    return -(-param.nbytes // _LINE_BYTES) * _LINE_BYTES


def _tensor(memory: memoryview, like: Tensor) -> Tensor:
    """A tensor at the start of `memory` with a storage of just its size, so saving it saves no more."""
    return torch.frombuffer(memory[: like.nbytes], dtype=like.dtype).view(like.shape)


def _part(numel: int, rank: int, num_ranks: int) -> slice:
    """Whole cache lines, except at the end: no two ranks write the same line."""
    line = _LINE_BYTES // 4
    num_lines = -(-numel // line)
    return slice(num_lines * rank // num_ranks * line, min(numel, num_lines * (rank + 1) // num_ranks * line))
