"""Optimizers for host memory: `CpuAdam`, and an update that replicas on one node divide.

Divides the optimizer's update among the replicas on one node: each rank updates a part, in all replicas.
In plain data parallelism every rank does the same whole update. With shared memory it is done once: a rank updates its
part of each parameter and writes the result to its own replica and, while it is in the cache, to the others. The
optimizer's state exists once for all ranks, which all see it whole.

A replica still belongs to its rank: other ranks do not see what the rank itself does to its parameters. Others write to
it only during an update, with a barrier before and after, so no rank is still reading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Adam
from typing_extensions import override

from torsh_distributed.comm.collectives.moves import barrier
from torsh_distributed.comm.shared_memory.buffers import allocate_shared_memory
from torsh_distributed.errors import InvalidArgument, TorshError
from torsh_distributed.native import ADAM_KERNEL, load
from torsh_distributed.parallel.torch_internals import _foreach_add_, _fused_adam_, _fused_adamw_

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


# Fewer elements than this are updated before another thread has started.
_ELEMENTS_PER_THREAD = 1 << 17


class CpuAdam(Adam):
    """torch's Adam, or AdamW with `decoupled_weight_decay=True`, for fp32 parameters in host memory, but faster.

    Sharded parameters are updated in place. The state is torch's: either can load what the other saved. Uses as many
    threads as torch (`torch.set_num_threads`), and torch's fused kernel if ours was not compiled.
    """

    _divided: DividedUpdate | None = None

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            maximize=maximize,
            decoupled_weight_decay=decoupled_weight_decay,
            foreach=False,  # nor fused: GradScaler leaves unscaling to fused optimizers
        )

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        _refuse_amsgrad(group)
        for param in group["params"]:
            if param.device.type not in ("cpu", "meta") or param.dtype != torch.float32:
                raise InvalidArgument(
                    f"CpuAdam updates fp32 parameters in host memory, not {param.dtype} on {param.device}",
                    hint="use torch.optim.Adam(fused=True)",
                    shape=tuple(param.shape),
                )

    def divide(self, params: Iterable[Tensor], group: dist.ProcessGroup) -> bool:
        """Let each rank of `group`, where these and their gradients are equal, do a part of every update for all.

        Returns whether it does: if all ranks are on one node and the kernel was compiled. Then all ranks must call
        `step` at the same point, and parameters and state are in memory that they share.
        """
        if compiled_kernel() is not None:
            self._divided = DividedUpdate.of(params, ("exp_avg", "exp_avg_sq"), group)
        return self._divided is not None

    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with nullcontext() if self._divided is None else self._divided.updating():
            for group in self.param_groups:
                self._update(group)
        return loss

    def _update(self, group: dict[str, Any]) -> None:
        params: list[Tensor] = []
        grads: list[Tensor] = []
        means: list[Tensor] = []
        squares: list[Tensor] = []
        steps: list[Tensor] = []
        self._init_group(group, params, grads, means, squares, [], steps)  # type: ignore[no-untyped-call]  # untyped in torch
        if not params:
            return
        _foreach_add_(steps, 1)
        alone, together = list[AdamPiece](), list[AdamPiece]()
        for param, grad, step in zip(params, grads, steps, strict=True):
            state = self.state[param]
            part = None if self._divided is None else self._divided.part(param, state)
            value, mean, square = map(_held, (param, state["exp_avg"], state["exp_avg_sq"]))
            tensors = value, _like(value, _held(grad)), mean, square
            (alone if part is None else together).append(AdamPiece(tensors, step, part))
        adam_update(group, alone)
        adam_update(group, together, [] if self._divided is None else self._divided.distances)


class AdamPiece(NamedTuple):
    """What one update changes."""

    tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    """Value, gradient, first and second moment: fp32, on one device, with the same strides."""
    step: Tensor
    """The number of this update, from 1: one value, on the device of the tensors."""
    part: slice | None = None
    """The elements to update, in memory order; None for all."""

    def entry(self) -> tuple[float, ...]:
        """Our kernel's argument: addresses, number of elements, number of updates."""
        start = 0 if self.part is None else self.part.start
        return (*(tensor.data_ptr() + 4 * start for tensor in self.tensors), self.numel(), float(self.step))

    def numel(self) -> int:
        """Elements to update."""
        return self.tensors[0].numel() if self.part is None else self.part.stop - self.part.start


def adam_update(group: Mapping[str, Any], pieces: Sequence[AdamPiece], distances: Sequence[int] = ()) -> None:
    """Update pieces in place, with the settings of a parameter group of Adam, AdamW or CpuAdam.

    By our kernel in contiguous host memory, by torch's fused one otherwise. `distances`, in bytes: where our kernel
    writes each new value too; only it can, and update a part.
    """
    _refuse_amsgrad(group)  # loaded state brings settings too
    kernel = compiled_kernel()
    by_kernel, by_torch = list[AdamPiece](), list[AdamPiece]()
    for piece in pieces:
        is_plain = all(tensor.is_cpu and tensor.is_contiguous() for tensor in piece.tensors)
        is_ours = piece.part is not None or (kernel is not None and is_plain)
        (by_kernel if is_ours else by_torch).append(piece)
    if by_kernel:
        _by_kernel(kernel, group, by_kernel, distances)
    if by_torch:
        _by_torch(group, by_torch)


def _by_kernel(kernel: Any, group: Mapping[str, Any], pieces: Sequence[AdamPiece], distances: Sequence[int]) -> None:
    num_elements = sum(piece.numel() for piece in pieces)
    kernel.adam(
        [piece.entry() for piece in pieces],
        float(group["lr"]),
        *map(float, group["betas"]),
        group["eps"],
        group["weight_decay"],
        group["decoupled_weight_decay"],
        group["maximize"],
        min(torch.get_num_threads(), 1 + num_elements // _ELEMENTS_PER_THREAD),
        list(distances),
    )


def _refuse_amsgrad(group: Mapping[str, Any]) -> None:
    if group.get("amsgrad"):
        raise InvalidArgument("our Adam has no amsgrad", hint="use torch.optim.Adam(amsgrad=True, fused=True)")


def _held(tensor: Tensor) -> Tensor:
    """What this rank holds of it. Not by type: importing DTensor takes a second that many jobs need not spend."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _like(value: Tensor, grad: Tensor) -> Tensor:
    """The gradient with its elements in the order of the parameter's: kernels, torch's too, ignore strides."""
    return grad if grad.stride() == value.stride() else torch.empty_like(value).copy_(grad)


def _by_torch(group: Mapping[str, Any], pieces: Sequence[AdamPiece]) -> None:
    kernel = _fused_adamw_ if group["decoupled_weight_decay"] else _fused_adam_
    values, grads, means, squares = map(list, zip(*(piece.tensors for piece in pieces), strict=True))
    beta1, beta2 = map(float, group["betas"])
    kernel(
        values,
        grads,
        means,
        squares,
        [],
        [piece.step.float() for piece in pieces],
        lr=float(group["lr"]),
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=group["maximize"],
    )


def compiled_kernel() -> Any | None:
    """The compiled kernel; None if it was not compiled."""
    return load(ADAM_KERNEL)
