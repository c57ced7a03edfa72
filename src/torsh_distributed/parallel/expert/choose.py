"""Whether a plan fits the experts of a model, and the strategy for them.

The rules are in `plan/compatibility/expert_rules.py`; here they are asked for the layers, whose settings may differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from typing_extensions import override

from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.expert.expert_strategy import ExpertDataParallel
from torsh_distributed.parallel.expert.layer import MoELayer, moe_layers
from torsh_distributed.parallel.expert.placed_experts import placed_experts, spread_names
from torsh_distributed.parallel.expert.spreading import spread_on_meta
from torsh_distributed.parallel.expert.stacked_experts import cut_stack, expert_runs, spread_params
from torsh_distributed.parallel.mesh.mesh import Mesh
from torsh_distributed.parallel.models.materialize import is_on_meta
from torsh_distributed.parallel.models.wrapping import ignored_modules
from torsh_distributed.parallel.strategy import check_one_device
from torsh_distributed.parallel.weights.model_weights import HeldParts, ModelWeights, Rows
from torsh_distributed.plan import ExpertConfig, Plan
from torsh_distributed.plan.compatibility.axis_rules import splits_model
from torsh_distributed.plan.compatibility.expert_rules import layer_clashes
from torsh_distributed.plan.problems import Problem, configuration_error


def expert_strategy(model: nn.Module, plan: Plan) -> ExpertDataParallel | None:
    """The strategy for a model with experts; None for one without, or if another strategy shards its parameters.

    Only for plans with replicas, shards and experts; every rank calls this. Raises ConfigurationError if the plan does
    not fit the model.
    """
    layers = check_experts(model, plan)
    if not layers and not spread_names(model, plan.mesh.ep):
        return None
    device = process_group.device() if is_on_meta(model) else check_one_device(model)
    mesh = Mesh(plan.mesh, device_type=device.type)
    if plan.mesh.shard > 1:
        for layer in layers.values():
            layer.spread(mesh.group("ep"), mesh.data_group)
        return None
    return ExpertDataParallel(model, plan.ddp, plan.distributed, mesh=mesh)


def check_experts(model: nn.Module, plan: Plan) -> dict[str, MoELayer]:
    """The model's layers with experts; raises ConfigurationError if the plan does not fit them. No communication."""
    layers = moe_layers(model)
    placed = placed_experts(model)
    if not layers and not (placed and plan.mesh.ep > 1):
        _refuse_without_experts(plan, has_experts=bool(placed))
        return layers
    for name, one in placed.items():
        one.check(name, plan.mesh.ep)
    if placed and not layers:
        _refuse_expert_keys(plan)
    for name, layer in layers.items():
        for key in sorted(plan.expert.model_fields_set):
            wanted, built = getattr(plan.expert, key), getattr(layer.config, key)
            if wanted != built:
                raise ConfigurationError(
                    f"expert.{key} is {wanted} in the plan, but {built} in the layer {name}",
                    hint="build the layer from the plan: MoELayer(input_dim, hidden_dim, plan.expert)",
                    key=f"expert.{key}",
                )
        _refuse(name, layer_clashes(plan, layer.config))
        if splits_model(plan) and layer.group is not None:
            raise ConfigurationError(
                f"{name} was built with a group, and {plan.mesh.equation} spreads its experts by itself",
                hint="build MoELayer without a group: its experts are then spread as the plan says",
                key="mesh.ep",
            )
    for name in placed:
        _refuse(name, layer_clashes(plan, None))
    ignored = ignored_modules(model, plan.fsdp.ignored_modules) if min(plan.mesh.shard, plan.mesh.ep) > 1 else ()
    for name in (*(f"{one}.experts" for one in layers), *placed):
        if name in ignored:
            raise ConfigurationError(
                f"{plan.mesh.equation}: fsdp.ignored_modules names the experts {name}, which differ between ranks",
                hint="leave them out of fsdp.ignored_modules",
            )
    return layers


def _refuse(layer: str, problems: Iterator[Problem]) -> None:
    """Raise the first one, if there is one, with the name of the layer."""
    for problem in problems:
        raise configuration_error([problem], where=layer)


def _changed_keys(plan: Plan) -> list[str]:
    """A key at its default asks for nothing."""
    default = ExpertConfig()
    return [key for key in ExpertConfig.model_fields if getattr(plan.expert, key) != getattr(default, key)]


def _refuse_expert_keys(plan: Plan) -> None:
    """The experts of other libraries come with their own router: our keys would have no effect."""
    changed = _changed_keys(plan)
    if changed:
        raise ConfigurationError(
            f"expert.{changed[0]} is for layers of this library, and the experts of this model have their own settings",
            hint=f"leave expert.{changed[0]} out of the plan, and set the model's configuration",
            key=f"expert.{changed[0]}",
        )


def _refuse_without_experts(plan: Plan, *, has_experts: bool) -> None:
    """A plan that asks for experts is wrong for a model without."""
    changed = _changed_keys(plan)
    if has_experts:
        _refuse_expert_keys(plan)
    elif plan.mesh.ep > 1 or changed:
        what = f"mesh.ep {plan.mesh.ep}" if plan.mesh.ep > 1 else f"expert.{changed[0]}"
        raise ConfigurationError(
            f"{what} is for models with experts, and this one has none",
            hint="put a MoELayer into the model, or leave it out of the plan",
            key=what.split()[0],
        )


class ExpertParts(HeldParts):
    """The experts along `ep`; construct it once they are spread. Everything else is held whole or as shards."""

    def __init__(self, model: nn.Module) -> None:
        self._owners = {name: owner for name, (owner, _) in spread_params(model).items()}

    @override
    def runs(self, name: str, shape: Sequence[int]) -> Rows | None:
        owner = self._owners.get(name)
        if owner is None:
            return super().runs(name, shape)
        return [(run.whole, run.whole + run.length) for run in expert_runs(owner)]

    @override
    def piece(self, name: str, whole: Tensor) -> Tensor:
        owner = self._owners.get(name)
        return whole if owner is None else cut_stack(whole, owner)


def load_spread(model: nn.Module, plan: Plan, weights: ModelWeights) -> None:
    """Spread the experts of a model on meta over `mesh.ep`, then fill this rank's; every rank calls this.

    Raises ConfigurationError if the plan does not fit the model, before anything is changed.
    """
    check_experts(model, plan)
    spread_on_meta(model, Mesh(plan.mesh, device_type=weights.device.type))
    weights.allocate(model)
    weights.load(model, ExpertParts(model))
