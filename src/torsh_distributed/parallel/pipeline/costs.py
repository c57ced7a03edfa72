"""The cost of each layer of a model: estimated from its parameters, or measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from typing_extensions import override

from torsh_distributed.parallel.pipeline.layer_graph import LayerGraph
from torsh_distributed.parallel.pipeline.untraced.layer_chain import LayerChain, measure_chain


def count_parameters(model: nn.Module, layers: Sequence[str]) -> list[float]:
    """Number of parameters of each layer."""
    return [float(sum(param.numel() for param in model.get_submodule(name).parameters())) for name in layers]


def estimate_work(model: nn.Module, layers: Sequence[str]) -> list[float]:
    """Each layer's estimated work per token: its number of parameters without embedding tables.

    A matrix costs a multiplication and an addition per element and token, a lookup almost nothing.
    """
    return [_work(model.get_submodule(name)) for name in layers]


def _work(layer: nn.Module) -> float:
    tables = {id(module.weight) for module in layer.modules() if isinstance(module, nn.Embedding)}
    return 1.0 + sum(param.numel() for param in layer.parameters() if id(param) not in tables)


def chain_costs(model: nn.Module, chain: LayerChain, balance: str) -> list[float]:
    """The cost of each layer of a chain; embeddings count with the first layer, norm and head with the last."""
    if balance == "time":
        return measure_chain(model, chain)
    cost = count_parameters if balance == "parameters" else estimate_work
    costs = cost(model, chain.layers)
    costs[0] += sum(cost(model, chain.before))
    costs[-1] += sum(cost(model, chain.after))
    return costs


def measure_time(model: nn.Module, form: LayerGraph, inputs: tuple[Any, ...], *, repeats: int = 3) -> list[float]:
    """Seconds of forward and backward of each layer on `inputs`, minimum of `repeats` runs; gradients are dropped."""
    runs = []
    for _ in range(repeats):
        timer = _LayerTimer(fx.GraphModule(model, form.graph))
        timer.run(*inputs)
        runs.append([timer.seconds[name] for name in form.layers])
    return [min(times) for times in zip(*runs, strict=True)]


class _LayerTimer(fx.Interpreter):
    """Runs a graph and times each layer's forward and backward, on inputs detached from earlier layers."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.seconds: dict[str, float] = {}

    @override
    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layer = self.submodules[target] if hasattr(self, "submodules") else self.fetch_attr(target)
        cut = [_cut(one) for one in args]
        started = time.perf_counter()
        out = layer(*cut, **kwargs)
        results = [one for one in (out if isinstance(out, tuple) else (out,)) if isinstance(one, Tensor)]
        wanted = [*(one for one in cut if isinstance(one, Tensor) and one.requires_grad), *layer.parameters()]
        trained = [one for one in wanted if one.requires_grad]
        if trained and results[0].requires_grad:
            torch.autograd.grad(results[0], trained, torch.ones_like(results[0]), allow_unused=True)
        self.seconds[str(target)] = time.perf_counter() - started
        return out


def _cut(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.is_floating_point())
    return value
