"""Initializes a model built on the meta device, a piece at a time, so no rank ever holds all of it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
                for name, module in self.pending()
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
        for name, module in self.pending():
            if id(module) in inside:
                self._make(name, module)

    @contextmanager
    def making(self, name: str, module: nn.Module) -> Iterator[None]:
        """Inside, a module of this name has its own values, not those of its submodules; then it is on meta again."""
        before = dict(module._parameters), dict(module._buffers)
        try:
            self._make(name, module)
            yield
        finally:
            module._parameters.update(before[0])
            module._buffers.update(before[1])
            self._made.clear()

    def _make(self, name: str, module: nn.Module) -> None:
        self._allocate(module)
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
            if param.is_meta:
                if param not in self._made:  # a shared parameter stays shared
                    empty = torch.empty_like(param, device=self._device)
                    self._made[param] = nn.Parameter(empty, requires_grad=param.requires_grad)
                setattr(module, name, self._made[param])
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                setattr(module, name, torch.empty_like(buffer, device=self._device))

    def pending(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules with tensors of their own on meta, by name."""
        for name, module in list(self._model.named_modules()):
            own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            if any(tensor.is_meta for tensor in own):
                yield name, module


def _can_reset(module: nn.Module) -> bool:
    return callable(getattr(module, "reset_parameters", None))
