"""`PipelineModule`: a model given as a list of layers, each of which takes the output of the one before."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as recompute
from typing_extensions import override

from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument
from torsh_distributed.migrate.deepspeed.deepspeed_errors import require
from torsh_distributed.migrate.deepspeed.initialize_group import ensure_group
from torsh_distributed.migrate.deepspeed.pipe.rank_topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    ProcessTopology,
)


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """The first item of each part, and the number of items at the end; the first parts take what is left over."""
    size, rest = divmod(num_items, num_parts)
    return [0, *itertools.accumulate(size + (part < rest) for part in range(num_parts))]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """As `partition_uniform`, with parts whose heaviest and lightest differ least.

    For every number of items and parts the best cut so far is kept with its heaviest and lightest part; of equally good
    cuts the one with the shorter last part wins.
    """
    if len(weights) <= num_parts:
        return partition_uniform(len(weights), num_parts)
    sums = [0.0, *itertools.accumulate(weights)]
    best: dict[tuple[int, int], tuple[float, float, list[int]]] = {(0, 0): (0.0, float("inf"), [0])}
    for parts in range(1, num_parts + 1):
        for end in range(parts, len(weights) + 1):
            spread = float("inf")
            for start in range(end):
                before = best.get((start, parts - 1))
                if before is None:
                    continue
                last = sums[end] - sums[start]
                heaviest, lightest = max(before[0], last), min(before[1], last)
                if heaviest - lightest <= spread:
                    spread = heaviest - lightest
                    best[end, parts] = (heaviest, lightest, [*before[2], end])
    return best[len(weights), num_parts][2]


def partition_layers(method: str, names: Sequence[str], num_params: Sequence[int], num_stages: int) -> list[int]:
    """The first layer of each stage and the number of layers; `names` are the layers' classes."""
    chosen = method.lower()
    require(
        len(names) >= num_stages,
        f"{len(names)} layers do not fill {num_stages} stages",
        hint="lower num_stages, or cut the model into more layers",
    )
    if chosen == "uniform":
        return partition_uniform(len(names), num_stages)
    if chosen in ("parameters", "best"):
        return partition_balanced(num_params, num_stages)
    if chosen.startswith("type:"):
        pattern = re.compile(method.partition(":")[2], re.IGNORECASE)
        weights = [int(bool(pattern.search(name))) for name in names]
        if not any(weights):
            raise RuntimeError(f"Partitioning '{pattern.pattern}' found no valid layers to partition.")
        return partition_balanced(weights, num_stages)
    raise InvalidArgument(
        f"Partitioning method {method} not implemented.", hint="use uniform, parameters or type:PATTERN", method=method
    )


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


class PipelineModule(nn.Module):
    """A model in `num_stages` stages; layers are modules, LayerSpecs or functions.

    Every rank builds all layers, in order, so that they start equal; the engine keeps those of this rank's stage. The
    layers are called `0`, `1`, … in the module's state.
    """

    def __init__(
        self,
        layers: Iterable[nn.Module | LayerSpec | Callable[[Any], Any]],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], None] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] | None = None,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        super().__init__()
        if num_stages is None and topology is None:
            raise RuntimeError("must provide num_stages or topology")
        ensure_group()
        world_size = process_group.world_size()
        if topology is None:
            assert num_stages is not None, "one of the two is given"
            if world_size % num_stages:
                raise RuntimeError(f"num_stages ({num_stages}) must divide distributed world size ({world_size})")
            topology = PipeDataParallelTopology(num_pp=num_stages, num_dp=world_size // num_stages)
        if topology.get_dim("model") > 1:
            raise FeatureNotAvailable(
                "a topology with a model axis is not supported: layers that split themselves are Megatron's",
                hint="use mesh.tp of a plan, through torsh_distributed.parallelize",
            )
        self.num_stages = topology.get_dim("pipe")
        self._topo = topology
        self._grid = PipelineParallelGrid(topology)
        self.stage_id = self._grid.get_stage_id()
        self.global_rank, self.world_size = process_group.rank(), world_size
        self.loss_fn = loss_fn
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self._recompute = activation_checkpoint_func
        self._checkpointable = checkpointable_layers
        self._layer_specs = list(layers)
        self._layers = self._build(seed_layers, seed_fn, base_seed)
        counts = [_trained_numel(layer) for layer in self._layers]
        self.parts = partition_layers(
            partition_method, [_name(one) for one in self._layer_specs], counts, self.num_stages
        )
        self._local_start, self._local_stop = self.parts[self.stage_id], self.parts[self.stage_id + 1]

    def _build(self, seed_layers: bool, seed_fn: Callable[[int], None] | None, base_seed: int) -> list[nn.Module]:
        tied: dict[str, nn.Module] = {}
        built: list[nn.Module] = []
        for index, spec in enumerate(self._layer_specs):
            if seed_layers:
                (seed_fn or torch.manual_seed)(base_seed + index)
            if isinstance(spec, TiedLayerSpec):
                layer: nn.Module = TiedUse(_tied_layer(spec, tied), spec.forward_fn)
            elif isinstance(spec, LayerSpec):
                layer = spec.build()
            elif isinstance(spec, nn.Module):
                layer = spec
            else:
                layer = FunctionLayer(spec)
            self.add_module(str(index), layer)
            built.append(layer)
        return built

    def pipeline_layers(self) -> list[nn.Module]:
        """The layers in order: how our pipeline reads a model."""
        return self._layers

    @property
    def split_points(self) -> tuple[str, ...]:
        """The first layer of every stage but the first."""
        return tuple(str(start) for start in self.parts[1:-1])

    @property
    def layers(self) -> list[nn.Module]:
        """All layers."""
        return self._layers

    @override
    def forward(self, forward_input: Any) -> Any:
        """All layers, one after the other, on this rank."""
        value = forward_input
        for layer in self._layers:
            value = layer(value)
        return value

    def mpu(self) -> PipelineParallelGrid:
        """This rank's place among stages and replicas."""
        return self._grid

    def topology(self) -> ProcessTopology:
        """The grid of all ranks."""
        return self._topo

    def num_pipeline_stages(self) -> int:
        """The number of stages."""
        return self.num_stages

    def stage_owner(self, layer_idx: int) -> int:
        """The stage that has a layer."""
        return next(stage for stage in range(self.num_stages) if layer_idx < self.parts[stage + 1])

    def get_layers(self) -> list[nn.Module]:
        """This stage's layers."""
        return self._layers[self._local_start : self._local_stop]

    def recompute_layers(self) -> None:
        """From now on backward recomputes the layers that `activation_checkpoint_interval` covers.

        Each of them is recomputed by itself: the memory is that of an interval of 1, the result that of any.
        """
        if not self.activation_checkpoint_interval:
            return
        for index, layer in enumerate(self._layers):
            is_named = self._checkpointable is None or type(layer).__name__ in self._checkpointable
            if is_named and next(layer.parameters(), None) is not None:
                _recompute_in_backward(self._layers[index], self._recompute)


def _recompute_in_backward(layer: nn.Module, function: Callable[..., Any] | None) -> None:
    forward = layer.forward

    def run(*inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*inputs)
        return recompute(forward, *inputs, use_reentrant=False) if function is None else function(forward, *inputs)

    layer.forward = run


def _tied_layer(spec: TiedLayerSpec, first: dict[str, nn.Module]) -> nn.Module:
    """A module of its own for each use, with the parameters of the first: a stage keeps or drops whole modules."""
    if spec.key not in first:
        first[spec.key] = spec.build()
        return first[spec.key]
    with torch.random.fork_rng():  # its values are thrown away, so the layers after it draw what they would have drawn
        layer = spec.build()
    for name, param in first[spec.key].named_parameters():
        owner, _, last = name.rpartition(".")
        layer.get_submodule(owner)._parameters[last] = param
    return layer


def _name(spec: Any) -> str:
    if isinstance(spec, LayerSpec):
        return spec.typename.__name__
    return type(spec).__name__ if isinstance(spec, nn.Module) else getattr(spec, "__name__", "")


def _trained_numel(layer: nn.Module) -> int:
    return sum(param.numel() for param in layer.parameters() if param.requires_grad)
