"""Layers that are built later: `LayerSpec`, and `TiedLayerSpec` for layers that share their weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from typing_extensions import override


class LayerSpec:
    """A layer's class and its arguments; `build()` makes it."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise RuntimeError(  # noqa: TRY004 (DeepSpeed raises this one)
                "LayerSpec only supports torch.nn.Module types."
            )
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def build(self, log: bool = False) -> nn.Module:
        """The layer."""
        return self.typename(*self.module_args, **self.module_kwargs)

    @override
    def __repr__(self) -> str:
        given = [*map(repr, self.module_args), *(f"{name}={value!r}" for name, value in self.module_kwargs.items())]
        return f"{self.typename.__name__}({', '.join(given)})"


class TiedLayerSpec(LayerSpec):
    """A layer that shares its weights with the others of the same `key`; `forward_fn(layer, inputs)` replaces its
    forward."""

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


class TiedUse(nn.Module):
    """One use of a layer that stands at several places: a module of its own around the shared one."""

    def __init__(self, layer: nn.Module, forward_fn: Callable[[nn.Module, Any], Any] | None) -> None:
        super().__init__()
        self.layer = layer
        self._forward_fn = forward_fn

    @override
    def forward(self, inputs: Any) -> Any:
        return self.layer(inputs) if self._forward_fn is None else self._forward_fn(self.layer, inputs)


class FunctionLayer(nn.Module):
    """A function among the layers."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self._function = function

    @override
    def forward(self, inputs: Any) -> Any:
        return self._function(inputs)
