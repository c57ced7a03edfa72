"""The sequential form of a model: its layers in the order in which they run, and what flows between them.

Found by tracing the model's own forward with torch.fx, layer modules as leaves. No data is needed, and names stay those
of the model.
"""

from __future__ import annotations

import inspect
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from typing_extensions import override

from torsh_distributed.errors import ConfigurationError

PROTOCOL = "pipeline_layers"
"""A method of this name on the model gives its layers, run one after the other, where tracing cannot find them."""

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class LayerGraph:
    """A traced forward: every layer is one call."""

    graph: fx.Graph
    layers: tuple[str, ...]
    """Names of the layer modules, in the order they are called."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the arguments of forward."""
        return tuple(str(node.target) for node in self.graph.nodes if node.op == "placeholder")


def trace_layers(model: nn.Module) -> LayerGraph:
    """The layers of `model` and the flow between them, or ConfigurationError saying what is needed."""
    if hasattr(model, PROTOCOL):
        return _chain(model)
    try:
        graph = _Tracer(model).trace(model, concrete_args=_defaults(model))
    except Exception as error:
        # Tracing runs the user's forward: whatever it raises means that the order of layers was not found.
        raise ConfigurationError(
            f"the layers of {type(model).__name__} could not be traced: {str(error).splitlines()[0]}",
            hint=f"its forward must not branch on values; or give the model a method {PROTOCOL}() that returns its"
            " layers, each called with the output of the one before",
        ) from error
    layers = tuple(str(node.target) for node in graph.nodes if node.op == "call_module")
    repeated = sorted({name for name in layers if layers.count(name) > 1})
    if repeated:
        raise ConfigurationError(
            f"the layer {repeated[0]} runs more than once in a forward: it cannot be put on one stage",
            hint="build a module for each call, sharing the parameters (they are then tied between stages)",
        )
    return LayerGraph(graph, layers)


def _chain(model: nn.Module) -> LayerGraph:
    """The form of a model that names its layers itself."""
    names = {id(module): name for name, module in model.named_modules()}
    graph = fx.Graph()
    value = graph.placeholder("input")
    layers = []
    for layer in getattr(model, PROTOCOL)():
        if id(layer) not in names:
            raise ConfigurationError(
                f"{PROTOCOL}() gave a module that is not part of the model",
                hint="return submodules of the model",
                layer=type(layer).__name__,
            )
        layers.append(names[id(layer)])
        value = graph.call_module(layers[-1], (value,))
    graph.output(value)
    return LayerGraph(graph, tuple(layers))


def _defaults(model: nn.Module) -> dict[str, Any]:
    """Arguments of forward that have a default keep it: the pipeline passes the others."""
    arguments = inspect.signature(model.forward).parameters.values()
    return {one.name: one.default for one in arguments if one.default is not inspect.Parameter.empty}


class _Tracer(fx.Tracer):
    """Looks into containers and what contains the blocks; takes every other module as a layer."""

    proxy_buffer_attributes = True
    """Tables in buffers are read in the graph, so that slicing them by the length of the input can be traced."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._open = _opened(model)

    @override
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self._open


def _opened(model: nn.Module) -> set[str]:
    """Names of the modules whose forward is looked into."""
    opened = {""}
    for name, module in model.named_modules():
        parent = name.rpartition(".")[0]
        if not name or parent not in opened:
            continue
        is_block = isinstance(model.get_submodule(parent), nn.Sequential | nn.ModuleList)
        if isinstance(module, _CONTAINERS) or (not is_block and _has_blocks(module)):
            opened.add(name)
    return opened


def _has_blocks(module: nn.Module) -> bool:
    """Whether a list of layers of one class lies inside."""
    for inner in module.modules():
        if isinstance(inner, nn.Sequential | nn.ModuleList):
            kinds = [type(child) for child in inner.children() if next(child.parameters(), None) is not None]
            if len(kinds) > 1 and len(set(kinds)) < len(kinds):
                return True
    return False


def is_number(node: fx.Node) -> bool:
    """Whether a traced value is a number or shape, not a tensor: it cannot travel between stages."""
    if node.op == "call_method":
        return node.target in ("size", "dim", "numel")
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] in ("shape", "ndim", "device", "dtype")
    if node.target is operator.getitem or getattr(node.target, "__module__", "") == "_operator":
        first = node.args[0]
        return isinstance(first, fx.Node) and is_number(first)
    return node.target in (torch.numel,)
