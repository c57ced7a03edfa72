"""Divides layers into stages: the linear partition problem, solved exactly."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from typing_extensions import override

from torsh_distributed.errors import ConfigurationError
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


def partition(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """The first layer of each stage such that the most expensive stage costs as little as possible; no stage is empty.

    Minimises the maximum over stages of the sum of costs by dynamic programming: O(layers² × stages). Among equally
    good cuts it takes the one with the smallest sum of squares.
    """
    num_layers = len(costs)
    if not 1 <= num_stages <= num_layers:
        raise ConfigurationError(
            f"{num_stages} stages need as many layers, but the model has {num_layers}",
            hint=f"lower mesh.pp or pipeline.stages_per_rank: their product may be at most {num_layers}",
            num_stages=num_stages,
            num_layers=num_layers,
        )
    sums = [0.0, *itertools.accumulate(costs)]
    # best[last]: cost of the first `last` layers in as many stages as rounds so far; begins: start of the last stage.
    best = [(sums[last], sums[last] ** 2) for last in range(num_layers + 1)]
    begins: list[list[int]] = [[0] * (num_layers + 1)]
    for stage in range(1, num_stages):
        found = [(math.inf, math.inf)] * (num_layers + 1)
        begin = [0] * (num_layers + 1)
        for last in range(stage + 1, num_layers + 1):
            for first in range(stage, last):
                own = sums[last] - sums[first]
                option = (max(best[first][0], own), best[first][1] + own**2)
                if option < found[last]:
                    found[last], begin[last] = option, first
        best = found
        begins.append(begin)
    starts, last = [], num_layers
    for begin in reversed(begins):
        last = begin[last]
        starts.append(last)
    return tuple(reversed(starts))
