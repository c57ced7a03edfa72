"""The layers of a model in the order they run, and the values that pass between them.

Found by tracing the model's own forward with torch.fx, with layer modules as leaves. Tracing needs no data and keeps
the model's names.
"""

from __future__ import annotations

import inspect
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from typing_extensions import override

from torsh_distributed.errors import ConfigurationError, first_line
from torsh_distributed.parallel.models.probing import tracing

PROTOCOL = "pipeline_layers"
"""A model that cannot be traced has a method of this name; it returns the layers, which run one after the other."""

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class LayerGraph:
    """A traced forward in which every layer is one call."""

    graph: fx.Graph
    layers: tuple[str, ...]
    """Names of the layer modules, in the order they are called."""
    is_chain: bool = False
    """The model names its layers itself: each takes what the one before returns, a tensor or a tuple of tensors."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the arguments of forward."""
        return tuple(str(node.target) for node in self.graph.nodes if node.op == "placeholder")


def trace_layers(model: nn.Module) -> LayerGraph:
    """The layers of `model` and the values between them; ConfigurationError says what is missing."""
    if hasattr(model, PROTOCOL):
        return _chain(model)
    buffers = dict(model.named_buffers())
    try:
        with tracing(model):
            graph = _Tracer(model).trace(model, concrete_args=_defaults(model))
            assigned = [name for name, value in buffers.items() if _read(model, name) is not value]
    except Exception as error:
        # Tracing runs the user's forward, which may raise anything.
        raise ConfigurationError(
            f"the layers of {type(model).__name__} could not be traced: {first_line(error)}",
            hint="its forward must not branch on values; or pass example=(inputs,) to parallelize(): its own forward is"
            f" kept then; or give the model a method {PROTOCOL}() that returns its layers, each of which takes the"
            " output of the previous one",
            key="mesh.pp",
        ) from error
    if assigned:
        raise ConfigurationError(
            f"the forward of {type(model).__name__} assigns its buffer {assigned[0]}, which stages cut from a trace"
            " would not do",
            hint="assign it in the forward of a layer; or pass example=(inputs,) to parallelize(): the model's own"
            " forward is kept then",
            key="mesh.pp",
        )
    layers = tuple(str(node.target) for node in graph.nodes if node.op == "call_module")
    repeated = sorted({name for name in layers if layers.count(name) > 1})
    if repeated:
        raise ConfigurationError(
            f"the layer {repeated[0]} runs more than once in a forward, so it does not fit in one stage",
            hint="build a module for each call and share the parameters (they are then tied between stages)",
            key="mesh.pp",
        )
    return LayerGraph(graph, layers)


def _read(model: nn.Module, name: str) -> Any:
    owner, _, last = name.rpartition(".")
    return model.get_submodule(owner)._buffers[last]


def _chain(model: nn.Module) -> LayerGraph:
    """The graph of a model that names its layers itself."""
    names = {id(module): name for name, module in model.named_modules()}
    graph = fx.Graph()
    value = graph.placeholder("input")
    layers = []
    for layer in getattr(model, PROTOCOL)():
        if id(layer) not in names:
            raise ConfigurationError(
                f"{PROTOCOL}() returned a module that is not part of the model",
                hint="return submodules of the model",
                layer=type(layer).__name__,
                key="mesh.pp",
            )
        layers.append(names[id(layer)])
        value = graph.call_module(layers[-1], (value,))
    graph.output(value)
    return LayerGraph(graph, tuple(layers), is_chain=True)


def _defaults(model: nn.Module) -> dict[str, Any]:
    """Arguments of forward with a default keep it; the pipeline passes the others."""
    arguments = inspect.signature(model.forward).parameters.values()
    return {one.name: one.default for one in arguments if one.default is not inspect.Parameter.empty}


class _Tracer(fx.Tracer):
    """Traces into containers and into modules that contain the blocks; every other module is a layer."""

    proxy_buffer_attributes = True
    """The graph reads buffers, so slicing a table by the length of the input can be traced."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._open = _opened(model)

    @override
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self._open


def _opened(model: nn.Module) -> set[str]:
    """Names of the modules whose forward is traced."""
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
    """Whether it contains a list of layers of one class."""
    for inner in module.modules():
        if isinstance(inner, nn.Sequential | nn.ModuleList):
            kinds = [type(child) for child in inner.children() if next(child.parameters(), None) is not None]
            if len(kinds) > 1 and len(set(kinds)) < len(kinds):
                return True
    return False


def is_number(node: fx.Node) -> bool:
    """Whether a traced value is a number or shape instead of a tensor; it cannot be sent between stages."""
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
