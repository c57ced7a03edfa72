"""Cuts a model into stages: their layers and modules, the values that pass between them, the parameters they share."""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from rich.table import Table
from torch import Tensor, fx, nn

from torsh_distributed.errors import ConfigurationError, InvalidArgument
from torsh_distributed.parallel.models.anatomy import anatomy_of, is_from_transformers
from torsh_distributed.parallel.models.example_inputs import example_inputs
from torsh_distributed.parallel.pipeline.layer_graph import LayerGraph, is_number, trace_layers
from torsh_distributed.parallel.pipeline.layer_partition import (
    chain_costs,
    count_parameters,
    estimate_work,
    measure_time,
    partition,
)
from torsh_distributed.parallel.pipeline.microbatches import Microbatches
from torsh_distributed.parallel.pipeline.untraced.layer_chain import LayerChain, find_chain
from torsh_distributed.parallel.pipeline.untraced.stage_clone import UntracedStage, check_stages

_log = logging.getLogger(__name__)

Balance = Literal["auto", "parameters", "time", "manual"]


@dataclass(frozen=True)
class Stage:
    """One stage of the plan: consecutive layers."""

    index: int
    layers: tuple[str, ...]
    cost: float
    """In the unit of the balance: parameters, estimated work, or seconds."""
    direct: tuple[str, ...] = ()
    """Names of parameters and buffers that the model's own forward, not a layer, reads in this stage."""


@dataclass(frozen=True)
class StagePlan:
    """A model cut into stages; `build` makes their modules on the ranks that need them."""

    model: nn.Module
    stages: tuple[Stage, ...]
    inputs: tuple[str, ...] | None
    """Names of the arguments that the first stage takes; None: every stage takes the batch as the model would."""
    balance: Balance
    edges: tuple[tuple[bool, ...], ...]
    """For each edge between stages and each value that crosses it: whether a layer computed it (an activation)."""
    tied: tuple[tuple[tuple[int, str], ...], ...]
    """For each parameter that several stages share: (stage, name) of every use."""
    make: Callable[[int], nn.Module] = field(repr=False)
    """From a stage's index to its module."""
    is_chain: bool = False
    """Layers take the result of the one before and nothing else; the first takes the inputs as they are."""
    microbatches: Microbatches = field(default_factory=Microbatches, repr=False)
    """The batch that the stages run on."""

    @property
    def keeps_forward(self) -> bool:
        """Whether stages run the model's own forward, so the model can compute its loss."""
        return self.inputs is None

    @property
    def imbalance(self) -> float:
        """Cost of the most expensive stage over the mean: the slowest stage sets the pace."""
        costs = [stage.cost for stage in self.stages]
        return max(costs) * len(costs) / max(sum(costs), 1e-12)

    def build(self, index: int) -> nn.Module:
        """The module of a stage: the model's own layers under their own names."""
        return self.make(index)

    def drop_others(self, keep: Sequence[int]) -> None:
        """Free the parameters of layers in other stages: the model keeps them on the meta device."""
        kept = {name for index in keep for name in self.stages[index].layers}
        for stage in self.stages:
            for name in stage.layers:
                if name not in kept:
                    _to_meta(self.model.get_submodule(name))

    def adopt(self, index: int, built: nn.Module) -> None:
        """Give the model the parameters that a built stage reads directly: they may have become shards."""
        for name in self.stages[index].direct:
            value = operator.attrgetter(name)(built)
            if isinstance(value, nn.Parameter):
                owner, _, last = name.rpartition(".")
                self.model.get_submodule(owner).register_parameter(last, value)

    def names(self, index: int) -> set[str]:
        """Names of the parameters and buffers of a stage."""
        return set(self.build(index).state_dict())

    def describe(self) -> Table:
        """A rich table of stages, their layers and costs."""
        unit = {"parameters": "parameters", "time": "seconds"}.get(self.balance, "work (estimate)")
        table = Table("stage", "layers", unit, "share", title=f"{len(self.stages)} stages, balance {self.balance}")
        total = sum(stage.cost for stage in self.stages)
        for stage in self.stages:
            names = stage.layers if len(stage.layers) < 4 else (stage.layers[0], "…", stage.layers[-1])
            table.add_row(str(stage.index), " ".join(names), f"{stage.cost:.4g}", f"{stage.cost / total:.0%}")
        return table


def split_into_stages(
    model: nn.Module,
    num_stages: int,
    *,
    balance: Balance = "auto",
    split_points: Sequence[str] = (),
    example: Any = None,
    agree: Callable[[list[float]], list[float]] | None = None,
) -> StagePlan:
    """Cut `model` into `num_stages` stages of about equal cost, or before the layers named in `split_points`.

    `example` is a microbatch of inputs, for `balance="time"` and for models that can be neither traced nor asked for
    an example, such as those of transformers; measured times differ between ranks, so `agree` returns
    the first rank's on all. The model itself is not changed.
    """
    form = _layers(model, example)
    costs = _costs(model, form, balance, example)
    if agree is not None:
        costs = agree(costs)
    starts = _manual(form, split_points, num_stages) if balance == "manual" else partition(costs, num_stages)
    edges = [*starts, len(form.layers)]
    runs = [form.layers[first:last] for first, last in itertools.pairwise(edges)]
    sums = [sum(costs[first:last]) for first, last in itertools.pairwise(edges)]
    if isinstance(form, LayerChain):
        plan = _kept(model, form, runs, sums, balance)
        check_stages(plan.make, num_stages, plan.microbatches, model, form.example)
    else:
        plan = _traced(model, form, runs, sums, balance)
    if plan.imbalance > 2:
        _log.warning(
            "the pipeline is unbalanced: its most expensive stage costs %.1f times the mean (%s)",
            plan.imbalance,
            ", ".join(f"{stage.cost:.3g}" for stage in plan.stages),
        )
    return plan


def _layers(model: nn.Module, example: Any) -> LayerGraph | LayerChain:
    """How the layers follow each other: traced, or seen by running the model once.

    Models of transformers are not traced: a trace knows no masks, and the model's own loss is lost.
    """
    if is_from_transformers(model):
        return find_chain(model, anatomy_of(model).layers, example_inputs(model, example))
    try:
        return trace_layers(model)
    except ConfigurationError:
        if example is None:
            raise
    return find_chain(model, anatomy_of(model).layers, example_inputs(model, example))


def _traced(
    model: nn.Module, form: LayerGraph, runs: Sequence[tuple[str, ...]], costs: Sequence[float], balance: Balance
) -> StagePlan:
    graphs, crossing, taken = _cut_graph(form, runs)
    feed = Microbatches()
    stages = tuple(
        Stage(index, run, cost, _read_directly(graph))
        for index, (run, graph, cost) in enumerate(zip(runs, graphs, costs, strict=True))
    )

    def make(index: int) -> nn.Module:
        stage = fx.GraphModule(model, graphs[index], class_name=f"Stage{index}")
        if taken[index]:
            places = [str(form.inputs.index(name)) for name in taken[index]]
            stage.register_forward_pre_hook(lambda _, received: (*received, *(feed.inputs[place] for place in places)))
        if form.is_chain:
            _pass_tuples(stage, feed if index == 0 else None, is_last=index == len(runs) - 1)
        return stage

    tied = _tied(model, stages)
    return StagePlan(model, stages, form.inputs, balance, crossing, tied, make, form.is_chain, feed)


def _pass_tuples(stage: nn.Module, feed: Microbatches | None, *, is_last: bool) -> None:
    """Tensors arrive one by one: several are the tuple that a layer returned. The first stage reads the batch."""
    if feed is not None:
        stage.register_forward_pre_hook(lambda _, received: (feed.inputs["0"],))
    else:
        stage.register_forward_pre_hook(lambda _, received: (received if len(received) > 1 else received[0],))
    if not is_last:
        stage.register_forward_hook(_check_sent)


def _check_sent(stage: nn.Module, _: object, output: Any) -> None:
    is_tuple = isinstance(output, tuple) and len(output) > 1 and all(isinstance(one, Tensor) for one in output)
    if isinstance(output, Tensor) or is_tuple:
        return
    kind = type(output).__name__
    if isinstance(output, tuple):
        kind += f" of {', '.join(type(one).__name__ for one in output) or 'nothing'}"
    raise InvalidArgument(
        f"the last layer of a stage returns a {kind}, but a tensor or a tuple of several tensors passes to the next",
        hint="return a tensor by itself, and make what is not a tensor where it is needed; or end the stage elsewhere",
    )


def _kept(
    model: nn.Module, chain: LayerChain, runs: Sequence[tuple[str, ...]], costs: Sequence[float], balance: Balance
) -> StagePlan:
    """Stages that keep the model's forward: the first has the embeddings, the last what runs after the layers."""
    last = len(runs) - 1
    stages = tuple(
        Stage(
            index,
            (*(chain.before if not index else ()), *run, *(chain.after if index == last else ())),
            cost,
            chain.direct if index == last else (),
        )
        for index, (run, cost) in enumerate(zip(runs, costs, strict=True))
    )
    feed = Microbatches()

    def make(index: int) -> nn.Module:
        return UntracedStage(model, chain, runs[index], (*stages[index].layers, *stages[index].direct), feed)

    edges = ((True,),) * last
    return StagePlan(model, stages, None, balance, edges, _tied(model, stages), make, microbatches=feed)


def _read_directly(graph: fx.Graph) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(node.target) for node in graph.nodes if node.op == "get_attr"))


def _costs(model: nn.Module, form: LayerGraph | LayerChain, balance: Balance, example: Any) -> list[float]:
    if isinstance(form, LayerChain):
        return chain_costs(model, form, balance)
    if balance == "parameters":
        return count_parameters(model, form.layers)
    if balance == "time":
        if example is None:
            raise ConfigurationError(
                'balance "time" measures the layers, so it needs inputs to run them on',
                hint="pass example=(inputs,), one microbatch",
                key="pipeline.balance",
            )
        return measure_time(model, form, example)
    return estimate_work(model, form.layers)


def _manual(form: LayerGraph | LayerChain, split_points: Sequence[str], num_stages: int) -> tuple[int, ...]:
    unknown = [name for name in split_points if name not in form.layers]
    if unknown:
        raise ConfigurationError(
            f"pipeline.split_points: {unknown[0]} is not a layer at which a stage can start",
            hint=f"the layers are {', '.join(form.layers)}",
        )
    starts = (0, *sorted(form.layers.index(name) for name in split_points))
    if len(set(starts)) != len(starts) or len(starts) != num_stages:
        raise ConfigurationError(
            f"{len(split_points)} split points make {len(set(starts))} stages, but the plan needs {num_stages}",
            hint=f"name the first layer of every stage except the first: {num_stages - 1} different layers",
            split_points=tuple(split_points),
            key="pipeline.split_points",
        )
    return starts


def _cut_graph(
    form: LayerGraph, runs: Sequence[Sequence[str]]
) -> tuple[list[fx.Graph], tuple[tuple[bool, ...], ...], list[list[str]]]:
    """A graph for each stage's layers, which values cross the edges between stages, and the inputs each stage takes.

    Stages pass on the values that later stages need from earlier ones. Inputs of the model, such as labels, are not
    sent: every rank has the batch.
    """
    begins = {run[0]: index for index, run in enumerate(runs) if index}
    stage_of: dict[fx.Node, int] = {}
    index = 0
    for node in form.graph.nodes:
        if node.op == "call_module" and node.target in begins:
            index = begins[node.target]
        stage_of[node] = index
    last = len(runs) - 1
    crossing = [_alive(form.graph, stage_of, edge) for edge in range(last)]
    graphs = []
    taken: list[list[str]] = []
    for stage in range(last + 1):
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        # The first stage's inputs are its arguments, among its own nodes.
        inputs = _inputs_used(form.graph, stage_of, stage) if stage else []
        for node in [*crossing[stage - 1], *inputs] if stage else []:
            copies[node] = graph.placeholder(node.name)
        taken.append([str(node.target) for node in inputs])
        for node in form.graph.nodes:
            if stage_of[node] != stage or node.op in ("output", "get_attr"):
                continue
            copies[node] = graph.node_copy(node, partial(_copied, graph, copies))
        result: Any
        if stage == last:
            output = next(node for node in form.graph.nodes if node.op == "output")
            result = fx.map_arg(output.args[0], partial(_copied, graph, copies))
        else:
            kept = [_copied(graph, copies, node) for node in crossing[stage]]
            result = kept[0] if len(kept) == 1 else tuple(kept)
        graph.output(result)
        graph.lint()
        graphs.append(graph)
    made = _activations(form.graph)
    return graphs, tuple(tuple(node in made for node in edge) for edge in crossing), taken


def _inputs_used(graph: fx.Graph, stage_of: dict[fx.Node, int], stage: int) -> list[fx.Node]:
    """Inputs of the model that a stage uses."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    return [node for node in inputs if any(stage_of[user] == stage for user in node.users)]


def _activations(graph: fx.Graph) -> set[fx.Node]:
    """Values that depend on a layer's output."""
    made: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "call_module" or any(used in made for used in node.all_input_nodes):
            made.add(node)
    return made


def _copied(graph: fx.Graph, copies: dict[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    """The node's copy in the stage's graph; each stage reads parameters and buffers itself."""
    if node not in copies:
        assert node.op == "get_attr", "every other value is computed or passed in before"
        copies[node] = graph.node_copy(node)
    return copies[node]


def _alive(graph: fx.Graph, stage_of: dict[fx.Node, int], edge: int) -> list[fx.Node]:
    """Values computed in stages up to `edge` that a later stage uses, in order of computation."""
    alive = [
        node
        for node in graph.nodes
        if node.op not in ("output", "get_attr", "placeholder")
        and stage_of[node] <= edge
        and any(stage_of[user] > edge for user in node.users)
    ]
    numbers = [node for node in alive if is_number(node)]
    if numbers:
        raise ConfigurationError(
            f"the value {numbers[0].name!r} of the model's forward is a number or a shape that a later stage needs",
            hint="read sizes from a tensor inside each layer, or choose split points that it does not cross",
            crossing=[node.name for node in alive],
            key="pipeline.split_points",
        )
    return alive


def _tied(model: nn.Module, stages: Sequence[Stage]) -> tuple[tuple[tuple[int, str], ...], ...]:
    """Parameters that more than one stage uses, through layers or directly."""
    uses: dict[int, list[tuple[int, str]]] = {}
    for stage in stages:
        for layer in stage.layers:
            for name, param in model.get_submodule(layer).named_parameters():
                uses.setdefault(id(param), []).append((stage.index, f"{layer}.{name}"))
        for name in stage.direct:
            value = operator.attrgetter(name)(model)
            if isinstance(value, nn.Parameter):
                uses.setdefault(id(value), []).append((stage.index, name))
    return tuple(tuple(where) for where in uses.values() if len({stage for stage, _ in where}) > 1)


def _to_meta(layer: nn.Module) -> None:
    for module in layer.modules():
        for name, param in module._parameters.items():
            if param is not None:
                module._parameters[name] = nn.Parameter(
                    torch.empty_like(param, device="meta"), requires_grad=param.requires_grad
                )
        for name, buffer in module._buffers.items():
            if isinstance(buffer, Tensor):
                module._buffers[name] = torch.empty_like(buffer, device="meta")
