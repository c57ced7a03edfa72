"""Initializes a model built on the meta device, a piece at a time, so no rank ever holds all of it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torsh_distributed.errors import InvalidArgument

ParamInit = Callable[[nn.Module], None]
"""Fills the parameters and buffers of one module, not those of its submodules."""


def is_on_meta(model: nn.Module) -> bool:
    """Whether some parameter has a shape but no memory."""
    return any(param.is_meta for param in model.parameters())


def model_init(model: nn.Module, path: str) -> ParamInit | None:
    """How the model initializes its module at `path`: `_init_weights(module)` of transformers models, the innermost
    one around the module; None if the model does not say."""
    while True:
        init: ParamInit | None = getattr(model.get_submodule(path), "_init_weights", None)
        if callable(init):
            return init
        if not path:
            return None
        path = path.rpartition(".")[0]


class Materializer:
    """Allocates and initialises tensors on the meta device.

    The values of a module depend only on `seed` and its name: equal on every rank, at every world size, however the
    model is divided into pieces. Without `init_fn` the model initializes its modules (`_init_weights`, as transformers
    models do), or every such module needs a `reset_parameters()`, like torch's layers.

    `_init_weights` of a module may fill the tensors of modules below it, as where the last layer of a block begins
    smaller than others. So a block is drawn as one unit, children first, also if only a part of it is wanted.
    """

    def __init__(self, model: nn.Module, device: torch.device, *, init_fn: ParamInit | None, seed: int) -> None:
        self._model = model
        self._device = device
        self._init_fn = init_fn
        self._seed = seed
        self._made: dict[Tensor, nn.Parameter] = {}
        lacking = sorted(
            {
                type(module).__name__
                for name, module in self._pending()
                if not _can_reset(module) and model_init(model, name) is None
            }
        )
        if init_fn is None and lacking:
            raise InvalidArgument(
                f"modules on the meta device cannot initialize their parameters: {', '.join(lacking)}",
                hint="give them a reset_parameters() method, or pass param_init_fn",
            )

    def make(self, piece: nn.Module) -> None:
        """Materialize all of `piece` that is still on meta. The caller's random state is not changed."""
        inside = set(map(id, piece.modules()))
        wanted = [self._unit_of(name) for name, module in self._pending() if id(module) in inside]
        for unit in dict.fromkeys(wanted):
            with self._drawing(unit, inside):
                pass

    def units(self) -> dict[str, dict[str, nn.Module]]:
        """The units with tensors on meta, in the order of the model, each with its modules by name."""
        found = dict.fromkeys(self._unit_of(name) for name, _ in self._pending())
        return {unit: dict(self._members(unit)) for unit in found}

    @contextmanager
    def drawing(self, unit: str) -> Iterator[None]:
        """Inside, all modules of a unit have values; then they are on meta again."""
        with self._drawing(unit, set()):
            yield
        self._made.clear()

    def _unit_of(self, name: str) -> str:
        """The largest module around the one of this name whose tensors may be initialized together."""
        unit = name
        while unit and self._init_fn is None:
            around = unit.rpartition(".")[0]
            parent = self._model.get_submodule(around)
            is_list = isinstance(parent, nn.ModuleList | nn.ModuleDict)
            if is_list or model_init(self._model, around) is None or callable(getattr(parent, "_init_weights", None)):
                break
            unit = around
        return unit

    @contextmanager
    def _drawing(self, unit: str, kept: Collection[int]) -> Iterator[None]:
        """Draw a unit; afterwards modules in `kept`, by id, keep the values of what was on meta, others lose them."""
        members = self._members(unit)
        before = [(module, dict(module._parameters), dict(module._buffers)) for _, module in members]
        try:
            for _, module in members:
                self._allocate(module)
            for name, module in members:
                self._initialize(name, module)
            yield
        finally:
            for module, params, buffers in before:
                is_kept = id(module) in kept
                _put_back(module._parameters, params, is_kept)
                _put_back(module._buffers, buffers, is_kept)

    def _members(self, unit: str) -> list[tuple[str, nn.Module]]:
        """The modules of a unit by name, children first: one, unless the model's own `_init_weights` fills them."""
        top = self._model.get_submodule(unit)
        is_alone = self._init_fn is not None or model_init(self._model, unit) is None
        if is_alone or callable(getattr(top, "_init_weights", None)):
            return [(unit, top)]
        return list(_upwards(unit, top))

    def _initialize(self, name: str, module: nn.Module) -> None:
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            torch.manual_seed((self._seed << 32) ^ zlib.crc32(name.encode()))
            init = self._init_fn or model_init(self._model, name)
            if init is not None:
                with torch.no_grad():
                    init(module)
            else:
                module.reset_parameters()  # type: ignore[operator]  # checked at construction

    def _allocate(self, module: nn.Module) -> None:
        for name, param in module.named_parameters(recurse=False):
            if param not in self._made or not param.is_meta:
                empty = torch.empty(param.shape, dtype=param.dtype, device=self._device)
                fresh = nn.Parameter(empty, requires_grad=param.requires_grad)
                if not param.is_meta:  # drawn before, for another part of the unit
                    module._parameters[name] = fresh
                    continue
                self._made[param] = fresh  # a shared parameter stays shared
            module._parameters[name] = self._made[param]
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=self._device)

    def _pending(self) -> Iterator[tuple[str, nn.Module]]:
        for name, module in list(self._model.named_modules()):
            own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            if any(tensor.is_meta for tensor in own):
                yield name, module


def _upwards(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """A module and all below it by name, children first."""
    for child_name, child in module.named_children():
        yield from _upwards(f"{name}.{child_name}" if name else child_name, child)
    yield name, module


def _put_back(now: dict[str, Any], before: dict[str, Any], is_kept: bool) -> None:
    now.update({name: one for name, one in before.items() if one is None or not (is_kept and one.is_meta)})


def _can_reset(module: nn.Module) -> bool:
    return callable(getattr(module, "reset_parameters", None))
