"""Units: modules whose parameters are fetched and evicted together, each in one flat tensor."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.offload.storage.mover import PendingCopy

_ALIGNMENT = 16
"""Elements: every parameter starts on a multiple of it, so vector loads stay aligned."""


@dataclass(frozen=True)
class ParamRange:
    """A parameter (on this rank) as elements `start` to `stop` of a flat tensor."""

    name: str
    param: nn.Parameter
    start: int
    shape: torch.Size

    @property
    def stop(self) -> int:
        """One past its last element."""
        return self.start + self.shape.numel()


@dataclass(eq=False)
class Unit:
    """Parameters that are fetched and evicted together; in the flat tensor trainable ones come first."""

    index: int
    name: str
    module: nn.Module
    param_ranges: list[ParamRange]
    dtype: torch.dtype
    """Of the parameters in use."""
    num_trainable: int
    trainable_numel: int
    numel: int
    flat: Tensor
    """On the device. While the unit is evicted its storage is empty; it is refilled under the same views, which
    autograd keeps from forward to backward."""
    is_root: bool = False
    """Whether it holds the parameters of no other unit: it is in use during all of forward, beside the others."""
    is_kept: bool = False
    """Whether the unit never leaves the device."""
    is_in_use: bool = False
    is_resident: bool = False
    pending_copy: PendingCopy | None = None
    """The copy that fills or refreshes `flat`, if it may be unfinished."""

    grad: Tensor | None = None
    """Gradients on the device, while they are collected or kept there, followed by one flag for each parameter."""
    arrived: set[int] = field(default_factory=set)
    """Trainable parameters (by position) whose gradient arrived in this backward."""
    present: set[int] = field(default_factory=set)
    """Those that have a gradient in this step."""
    flags: Tensor | None = None
    """How many ranks have used each trainable parameter, once reduced."""
    sq_norm: Tensor | None = None
    """Sum of squares of this step's gradients; None while there are none."""

    @property
    def num_bytes(self) -> int:
        """Of the parameters on the device."""
        return self.numel * self.dtype.itemsize

    @property
    def grad_numel(self) -> int:
        """Of the gradient buffer: gradients and flags."""
        return self.trainable_numel + self.num_trainable

    @property
    def grad_bytes(self) -> int:
        """Of the gradients on the device."""
        return self.grad_numel * self.dtype.itemsize

    def attach(self) -> None:
        """Point the parameters into the flat tensor."""
        for entry in self.param_ranges:
            entry.param.data = self.flat[entry.start : entry.stop].view(entry.shape)

    def detach(self) -> None:
        """Empty the parameters: code that uses one now fails on its shape instead of reading freed memory."""
        empty = torch.empty(0, dtype=self.dtype, device=self.flat.device)
        for entry in self.param_ranges:
            entry.param.data = empty


def find_modules(model: nn.Module, chosen: Sequence[nn.Module] | None = None) -> list[tuple[str, nn.Module]]:
    """The modules that become units, by name, in order: those `chosen`, or the members of ModuleLists and Sequentials.

    In a model without such a list, its children. Parameters outside these belong to the root unit, which is fetched
    for the whole forward.
    """
    names = {id(module): name for name, module in model.named_modules()}
    if chosen is not None:
        strangers = [type(module).__name__ for module in chosen if id(module) not in names]
        if strangers:
            raise InvalidArgument(
                "a unit is not a module of the model", hint="pass modules of the model", units=strangers
            )
        return [(names[id(module)], module) for module in chosen]
    listed = list(_members(model))
    found = listed or [child for child in model.children() if any(True for _ in child.parameters())]
    return [(names[id(module)], module) for module in found]


def _members(module: nn.Module) -> Iterator[nn.Module]:
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    for child in module.children():
        if is_list and not isinstance(child, nn.ModuleList):
            if any(True for _ in child.parameters()):
                yield child
        else:
            yield from _members(child)


def build_units(
    model: nn.Module,
    device: torch.device,
    *,
    compute_dtype: torch.dtype | None = None,
    chosen: Sequence[nn.Module] | None = None,
) -> list[Unit]:
    """The units of a model in order; the root unit, if any parameters are left for it, first."""
    modules = find_modules(model, chosen)
    holders: dict[int, set[str]] = {}
    for name, module in modules:
        for param in module.parameters():
            holders.setdefault(id(param), set()).add(name)
    # A parameter that two units share belongs to the root: it must be there for both.
    rest = [(name, param) for name, param in model.named_parameters() if len(holders.get(id(param), ())) != 1]
    kinds = [("", model, rest)]
    prefixes = {id(param): name for name, param in model.named_parameters()}
    for name, module in modules:
        own = [(prefixes[id(param)], param) for param in module.parameters() if len(holders[id(param)]) == 1]
        kinds.append((name, module, own))
    numbers = itertools.count()
    units = [
        _unit(next(numbers), name or "the model itself", module, params, device, compute_dtype)
        for name, module, params in kinds
        if params
    ]
    for unit in units:
        unit.is_root = unit.module is model
    return units


def _unit(
    index: int,
    name: str,
    module: nn.Module,
    params: list[tuple[str, nn.Parameter]],
    device: torch.device,
    compute_dtype: torch.dtype | None,
) -> Unit:
    dtypes = {param.dtype: label for label, param in params}
    if len(dtypes) > 1 and compute_dtype is None:
        (one, first), (two, second), *_ = dtypes.items()
        raise InvalidArgument(
            f"parameters of {name} have two dtypes: {first} is {one}, {second} is {two}",
            hint="give the model one dtype, or pass compute_dtype",
        )
    dtype = compute_dtype or next(iter(dtypes))
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise InvalidArgument(
            f"parameters of {name} are {dtype}", hint="offload supports float32, bfloat16 and float16 parameters"
        )
    param_ranges, start, trainable_numel, num_trainable = [], 0, 0, 0
    for label, param in sorted(params, key=lambda item: not item[1].requires_grad):
        param_ranges.append(ParamRange(label, param, start, param.shape))
        start += -(-param.numel() // _ALIGNMENT) * _ALIGNMENT
        if param.requires_grad:
            trainable_numel, num_trainable = start, num_trainable + 1
    flat = torch.empty(start, dtype=dtype, device=device)
    flat.untyped_storage().resize_(0)
    return Unit(index, name, module, param_ranges, dtype, num_trainable, trainable_numel, start, flat)
