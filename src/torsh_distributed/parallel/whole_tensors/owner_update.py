"""Gives an optimizer whole tensors: each spread parameter is collected on one rank, updated there, and sent back.

While the optimizer steps, its groups hold the whole parameters that this rank owns, with whole gradients, and those
that every rank holds whole anyway. Between steps they hold the parameters themselves, so clipping, loss scaling and
schedulers see what they expect. The state of a parameter is whole and on its owner only: together the ranks hold it
once, as if it were sharded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from torsh_distributed.comm.collectives.moves import all_to_all_single
from torsh_distributed.comm.collectives.objects import all_gather_object
from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.state.held_tensors import (
    DimRun,
    HeldBox,
    WholeLayout,
    local_part_of,
    values_of_owners,
    whole_layout,
    whole_runs,
)
from torsh_distributed.parallel.state.whole_state import StateParts


@dataclass(frozen=True)
class SpreadTensor:
    """A tensor of which each rank of a group holds a part, and the rank that gets it whole."""

    layouts: tuple[WholeLayout, ...]
    """By rank of the group."""
    owner: int
    """A rank of the group."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self.layouts[0].shape

    @property
    def is_covered(self) -> bool:
        """Whether the ranks together hold every element."""
        boxes = {(box.whole, box.sizes): box.numel for layout in self.layouts for box in layout.boxes}
        return sum(boxes.values()) == math.prod(self.shape)

    @property
    def is_whole_at_owner(self) -> bool:
        """Whether the owner holds all of it anyway."""
        return not any(self.missing)

    @cached_property
    def missing(self) -> tuple[tuple[HeldBox, ...], ...]:
        """By rank, the boxes that the owner gets from it: each from the first rank that holds it, none it has."""
        seen = {(box.whole, box.sizes) for box in self.layouts[self.owner].boxes}
        found = []
        for layout in self.layouts:
            new = tuple(box for box in layout.boxes if (box.whole, box.sizes) not in seen)
            seen |= {(box.whole, box.sizes) for box in new}
            found.append(new)
        return tuple(found)


@torch.no_grad()
def collect(tensors: Sequence[SpreadTensor], held: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor | None]:
    """Each tensor whole on its owner, None elsewhere; `held` is what this rank has of each, all of one dtype.

    Every rank of the group calls this with the same tensors. What an owner holds whole anyway is not copied.
    """
    me = group.rank()
    wholes = [_at_owner(one, local) if one.owner == me else None for one, local in zip(tensors, held, strict=True)]
    sent: list[list[Tensor]] = [[] for _ in range(group.size())]
    received: list[list[Tensor]] = [[] for _ in range(group.size())]
    for one, local, whole in zip(tensors, held, wholes, strict=True):
        sent[one.owner] += [box.of(local) for box in one.missing[me]]
        if whole is not None:
            for rank, boxes in enumerate(one.missing):
                received[rank] += [box.of_whole(whole) for box in boxes]
    if not all(one.is_whole_at_owner for one in tensors):
        _exchange(sent, received, held[0], group)
    return wholes


@torch.no_grad()
def give_back(
    tensors: Sequence[SpreadTensor],
    wholes: Sequence[Tensor | None],
    held: Sequence[Tensor],
    group: dist.ProcessGroup,
) -> None:
    """Write what the owners have into `held` on every rank, in place; every rank calls this with the same tensors."""
    me = group.rank()
    sent: list[list[Tensor]] = [[] for _ in range(group.size())]
    received: list[list[Tensor]] = [[] for _ in range(group.size())]
    for one, local, whole in zip(tensors, held, wholes, strict=True):
        if whole is None:
            received[one.owner] += [box.of(local) for box in one.layouts[me].boxes]
            continue
        if not one.is_whole_at_owner:
            for box in one.layouts[me].boxes:
                box.of(local).copy_(box.of_whole(whole))
        for rank, layout in enumerate(one.layouts):
            if rank != me:
                sent[rank] += [box.of_whole(whole) for box in layout.boxes]
    _exchange(sent, received, held[0], group)


def _at_owner(one: SpreadTensor, local: Tensor) -> Tensor:
    """The tensor with the owner's own boxes in it; `local` itself if that is all of it."""
    if one.is_whole_at_owner:
        return local
    whole = local.new_empty(one.shape)
    for box in one.layouts[one.owner].boxes:
        box.of_whole(whole).copy_(box.of(local))
    return whole


def _exchange(
    sent: Sequence[Sequence[Tensor]], received: Sequence[Sequence[Tensor]], like: Tensor, group: dist.ProcessGroup
) -> None:
    """Send tensors to each rank, and fill those of `received`, views, with what each rank sends."""
    flat = [part.reshape(-1) for parts in sent for part in parts]
    answer = all_to_all_single(
        torch.cat(flat) if flat else like.new_empty(0),
        [sum(part.numel() for part in parts) for parts in sent],
        [sum(part.numel() for part in parts) for parts in received],
        group=group,
    )
    targets = [part for parts in received for part in parts]
    for target, values in zip(targets, torch.split(answer, [part.numel() for part in targets]), strict=True):
        target.copy_(values.view(target.shape))


_MESSAGE_BYTES = 25 * 2**20
_OF_DTENSOR = ("_local_tensor", "_spec")


class OwnerUpdate:
    """Hooks into an optimizer's steps; every rank of `group` makes one, with the same parameters in the same order.

    `params` are those to give whole, by the names of `parts`, which says what this rank holds of each. Those that all
    ranks hold whole are left to every rank, unless `divides_replicas`: then each has one owner too, whose state exists
    once.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        params: Mapping[str, nn.Parameter],
        parts: StateParts,
        group: dist.ProcessGroup,
        *,
        divides_replicas: bool = False,
    ) -> None:
        self._group = group
        self._names = {param: name for name, param in params.items()}
        self._tensors = self._spread(params, parts, divides_replicas)
        self._wholes = {param: _placeholder(param) for param, one in self._tensors.items() if one.owner == group.rank()}
        self._num_params = _num_params(optimizer)
        self._before: list[list[nn.Parameter]] | None = None
        self._active: list[nn.Parameter] = []
        if self._tensors:
            self._take_state(optimizer, parts)
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that hold the parameters together."""
        return self._group

    @property
    def spread_names(self) -> set[str]:
        """The names of the parameters whose state the owners keep whole."""
        return {self._names[param] for param in self._tensors}

    def owns(self, param: Tensor) -> bool:
        """Whether this rank keeps the state of a parameter: it owns it, or every rank does."""
        return param not in self._tensors or param in self._wholes

    def whole_shape(self, param: Tensor) -> tuple[int, ...] | None:
        """The shape of a parameter whose state is kept whole by its owner; None for any other."""
        one = self._tensors.get(param)  # type: ignore[call-overload]  # a Tensor is found by identity too
        return None if one is None else one.shape

    def _take_state(self, optimizer: Optimizer, parts: StateParts) -> None:
        """Bring state that the optimizer has already to the owners; every rank calls this."""
        for param, one in self._tensors.items():
            kept = optimizer.state.pop(param, None)
            if kept is None:
                continue
            whole = {key: _joined(parts, self._names[param], param, one.shape, value) for key, value in kept.items()}
            if param in self._wholes:
                optimizer.state[param] = whole

    def _spread(
        self, params: Mapping[str, nn.Parameter], parts: StateParts, divides_replicas: bool
    ) -> dict[nn.Parameter, SpreadTensor]:
        """What each rank holds of each parameter; owners are chosen so that all have about as many elements."""
        mine = {name: _plain(parts.layout(name, param)) for name, param in params.items()}
        everyone = all_gather_object(mine, group=self._group)
        layouts = {name: tuple(_layout(theirs[name]) for theirs in everyone) for name in params}
        spread = {
            name: found
            for name, found in layouts.items()
            if divides_replicas or any(layout.local_shape != layout.shape for layout in found)
        }
        loads = [0] * self._group.size()
        made = {}
        for name in sorted(spread, key=lambda name: -math.prod(spread[name][0].shape)):
            owner = loads.index(min(loads))
            loads[owner] += math.prod(spread[name][0].shape)
            made[name] = SpreadTensor(spread[name], owner)
            if not made[name].is_covered:
                raise InvalidArgument(
                    f"no rank can get {name} whole: parts of it are on ranks outside the group",
                    hint="use an element-wise optimizer such as AdamW under this plan",
                )
        return {param: made[name] for name, param in params.items() if name in made}

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(callable(argument) for argument in (*args[1:], *kwargs.values())):
            raise InvalidArgument(
                "an optimizer over spread parameters takes no closure: gradients must be computed before its step",
                hint="compute the loss and call backward before step()",
            )
        self._restore(optimizer)  # after a step that raised
        if self._num_params != _num_params(optimizer):
            raise InvalidArgument(
                "parameters were added to an optimizer that is given whole tensors, and nobody owns them",
                hint="add all groups before parallelize(); freeze what shall learn later with requires_grad_(False)",
            )
        self._active = self._with_gradient()
        for params in self._messages():
            tensors = [self._tensors[param] for param in params]
            values = collect(tensors, [local_part_of(param) for param in params], self._group)
            grads = collect(tensors, [_gradient(param) for param in params], self._group)
            for param, value, grad in zip(params, values, grads, strict=True):
                if value is not None:
                    whole = self._wholes[param]
                    whole.data, whole.grad = value, grad
        self._before = [group["params"] for group in optimizer.param_groups]
        owned = {param: self._wholes[param] for param in self._active if param in self._wholes}
        for group in optimizer.param_groups:
            group["params"] = [
                owned.get(param, param) for param in group["params"] if param not in self._tensors or param in owned
            ]
        for param, whole in owned.items():
            if param in optimizer.state:
                optimizer.state[whole] = optimizer.state.pop(param)

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for params in self._messages():
            give_back(
                [self._tensors[param] for param in params],
                [self._wholes[param].data if param in self._wholes else None for param in params],
                [local_part_of(param) for param in params],
                self._group,
            )
        self._restore(optimizer)

    def _restore(self, optimizer: Optimizer) -> None:
        """Give the groups their parameters back, and free what was collected."""
        if self._before is None:
            return
        for group, params in zip(optimizer.param_groups, self._before, strict=True):
            group["params"] = params
        self._before = None
        for param, whole in self._wholes.items():
            if whole in optimizer.state:
                optimizer.state[param] = optimizer.state.pop(whole)
            whole.grad, whole.data = None, whole.data.new_empty(0)

    def _with_gradient(self) -> list[nn.Parameter]:
        """The parameters that have a gradient on some rank: all ranks must move the same ones."""
        params = list(self._tensors)
        if not params:
            return []
        device = local_part_of(params[0]).device
        flags = torch.tensor([int(param.grad is not None) for param in params], device=device)
        found = all_reduce(flags, op="max", group=self._group).tolist()
        return [param for param, has_grad in zip(params, found, strict=True) if has_grad]

    def _messages(self) -> Iterator[list[nn.Parameter]]:
        """The active parameters in messages of one dtype; by their whole size, which is the same on every rank."""
        batch: list[nn.Parameter] = []
        num_bytes = 0
        for param in self._active:
            size = math.prod(self._tensors[param].shape) * param.element_size()
            if batch and (num_bytes + size > _MESSAGE_BYTES or batch[0].dtype != param.dtype):
                yield batch
                batch, num_bytes = [], 0
            batch.append(param)
            num_bytes += size
        if batch:
            yield batch


def _placeholder(param: nn.Parameter) -> nn.Parameter:
    """Stands for the whole parameter in the optimizer, with what users set on it; empty between steps."""
    made = nn.Parameter(local_part_of(param).new_empty(0))
    made.__dict__.update({key: value for key, value in vars(param).items() if key not in _OF_DTENSOR})
    return made


def _num_params(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _gradient(param: nn.Parameter) -> Tensor:
    """What this rank holds of the gradient; zeros if only other ranks have one."""
    return torch.zeros_like(local_part_of(param)) if param.grad is None else local_part_of(param.grad)


def _joined(parts: StateParts, name: str, param: Tensor, shape: Sequence[int], value: Any) -> Any:
    """The whole of what the optimizer keeps of a parameter; values of another shape belong to all of it already."""
    if not isinstance(value, Tensor) or not value.dim() or value.shape != param.shape:
        return value
    is_whole = tuple(value.shape) == tuple(shape) and not hasattr(value, "device_mesh")
    return value if is_whole else parts.joined(name, value)


def _plain(layout: WholeLayout) -> list[Any]:
    """A layout as lists, to send."""
    return [list(layout.shape), [[list(one) for one in box] for box in layout.boxes], list(layout.local_shape)]


def _layout(plain: Sequence[Any]) -> WholeLayout:
    shape, boxes, local_shape = plain
    return WholeLayout(tuple(shape), tuple(HeldBox(*(tuple(one) for one in box)) for box in boxes), tuple(local_shape))


class OwnedState(StateParts):
    """The parts of an optimizer's state where owners keep that of some parameters; for the rest, those of `inner`."""

    def __init__(self, inner: StateParts, update: OwnerUpdate) -> None:
        self._inner = inner
        self._update = update
        self._names = update.spread_names

    @override
    def first_name(self, name: str) -> str:
        return self._inner.first_name(name)

    @override
    def keeps(self, param: Tensor) -> bool:
        return self._update.owns(param)

    @override
    def check(self, name: str, param: Tensor, optimizer: Optimizer) -> None:
        if name not in self._names:
            self._inner.check(name, param, optimizer)

    @override
    def joined(self, name: str, value: Tensor) -> Tensor:
        return value.detach() if name in self._names else self._inner.joined(name, value)

    @override
    def part(self, name: str, value: Tensor, like: Tensor) -> Tensor:
        return value if name in self._names else self._inner.part(name, value, like)

    @override
    def runs(self, name: str, shape: Sequence[int]) -> tuple[list[int], list[list[DimRun]]]:
        return (list(shape), whole_runs(shape)) if name in self._names else self._inner.runs(name, shape)

    @override
    def like(self, param: Tensor) -> Tensor:
        shape = self._update.whole_shape(param)
        return self._inner.like(param) if shape is None else torch.empty(shape, dtype=param.dtype, device="meta")

    @override
    def layout(self, name: str, value: Tensor) -> WholeLayout:
        return whole_layout(tuple(value.shape)) if name in self._names else self._inner.layout(name, value)

    @override
    def fits(self, mine: list[list[str]], saved: list[list[str]]) -> bool:
        return self._inner.fits(mine, saved)

    @override
    def all_groups(self, mine: list[list[str]]) -> list[list[str]]:
        return self._inner.all_groups(mine)

    @override
    def all_values(self, mine: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        owned = {name: values for name, values in mine.items() if name in self._names}
        return self._inner.all_values({**mine, **values_of_owners(owned, self._update.group)})

    @override
    def all_plain(self, mine: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for theirs in all_gather_object(mine, group=self._update.group):
            found = {**theirs, **found}
        return self._inner.all_plain(found)
