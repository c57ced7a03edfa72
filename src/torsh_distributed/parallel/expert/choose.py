"""Whether a plan fits the experts of a model, and the strategy for them.

`plan/compatibility` checks what is known from the plan alone; layers may have other settings than the plan.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.expert.expert_strategy import ExpertDataParallel
from torsh_distributed.parallel.expert.layer import MoELayer, moe_layers
from torsh_distributed.parallel.expert.placed_experts import PlacedExperts, placed_experts, spread_names
from torsh_distributed.parallel.mesh.mesh import Mesh
from torsh_distributed.parallel.models.materialize import is_on_meta
from torsh_distributed.parallel.models.wrapping import ignored_modules
from torsh_distributed.parallel.strategy import check_one_device
from torsh_distributed.plan import ExpertConfig, Plan
from torsh_distributed.plan.compatibility.axis_rules import splits_model


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
                )
        _check_layer(name, layer, plan)
    _check_shards(model, layers, placed, plan)
    _check_gradients(plan)
    if plan.offload.enabled:
        raise ConfigurationError(
            "offload.enabled does not support models with experts",
            hint="set offload.enabled = false, or spread experts over more ranks",
        )
    return layers


def _changed_keys(plan: Plan) -> list[str]:
    """A key at its default asks for nothing."""
    default = ExpertConfig()
    return [key for key in ExpertConfig.model_fields if getattr(plan.expert, key) != getattr(default, key)]


def _refuse_expert_keys(plan: Plan) -> None:
    """The experts of other libraries come with their own router: keys of ours would have no effect."""
    changed = _changed_keys(plan)
    if changed:
        raise ConfigurationError(
            f"expert.{changed[0]} is for layers of this library, and the experts of this model have their own settings",
            hint=f"leave expert.{changed[0]} out of the plan, and set the model's configuration",
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
        )


def _check_gradients(plan: Plan) -> None:
    """Gradients of experts are averaged uncompressed, in the format they have, except where FSDP2 averages them."""
    averaged_by_fsdp2 = plan.mesh.shard > 1
    if plan.compress.method != "none" and not (averaged_by_fsdp2 and not splits_model(plan)):
        raise ConfigurationError(
            f"compress.method = {plan.compress.method} does not support models with experts",
            hint='set compress.method = "none"',
        )
    if plan.precision.reduce_dtype != "same" and not averaged_by_fsdp2:
        raise ConfigurationError(
            f"precision.reduce_dtype = {plan.precision.reduce_dtype} does not support models with experts",
            hint='set precision.reduce_dtype = "same"',
        )


def _check_layer(name: str, layer: MoELayer, plan: Plan) -> None:
    """Refuse what a layer cannot do on this mesh."""
    mesh, config = plan.mesh, layer.config
    if mesh.ep > 1 and config.placement == "contiguous" and config.num_experts % mesh.ep:
        fitting = [degree for degree in range(1, config.num_experts + 1) if config.num_experts % degree == 0]
        raise ConfigurationError(
            f"{name}: expert.num_experts {config.num_experts} does not spread evenly over mesh.ep {mesh.ep}",
            hint=f"take a multiple of {mesh.ep}, or mesh.ep from {', '.join(map(str, fitting))}",
            num_experts=config.num_experts,
            ep=mesh.ep,
        )
    elsewhere = config.num_experts - config.num_experts // mesh.ep
    if mesh.ep > 1 and config.hot_copies > elsewhere:
        raise ConfigurationError(
            f"{name}: expert.hot_copies {config.hot_copies} is above the {elsewhere} of {config.num_experts} experts "
            f"that a rank does not have at mesh.ep {mesh.ep}",
            hint=f"set expert.hot_copies to at most {elsewhere}; 1 is a good start",
        )
    if mesh.cp > 1 and config.overflow != "none":
        raise ConfigurationError(
            f"{name}: expert.overflow = {config.overflow!r} with mesh.cp {mesh.cp}: capacity is given in the order of"
            " tokens, and no rank has them in the order of the batch",
            hint='set expert.overflow = "none"',
        )
    drawn = [key for key in ("router_jitter", "gate_dropout", "dropout") if getattr(config, key) > 0]
    if mesh.tp > 1 and drawn:
        raise ConfigurationError(
            f"{name}: expert.{drawn[0]} {getattr(config, drawn[0])} with mesh.tp {mesh.tp}: ranks that compute the same"
            " tokens would draw different numbers",
            hint=f"set expert.{drawn[0]} = 0, or mesh.tp = 1",
        )
    if splits_model(plan) and layer.group is not None:
        raise ConfigurationError(
            f"{name} was built with a group, and {mesh.equation} spreads its experts by itself",
            hint="build MoELayer without a group: its experts are then spread as the plan says",
        )


def _check_shards(
    model: nn.Module, layers: Mapping[str, MoELayer], placed: Mapping[str, PlacedExperts], plan: Plan
) -> None:
    """Refuse what experts cannot do if parameters are sharded."""
    if plan.mesh.shard == 1:
        return
    if plan.fsdp.strategy == "shard_optimizer":
        raise ConfigurationError(
            f"{plan.mesh.equation}: fsdp.strategy = shard_optimizer does not support models with experts",
            hint="shard parameters too: fsdp.strategy = full_shard; or use mesh.dp in place of mesh.shard",
        )
    if plan.mesh.ep == 1:
        return
    ignored = ignored_modules(model, plan.fsdp.ignored_modules)
    for name, layer in layers.items():
        for key, what in (("rebalance_threshold", "moves"), ("hot_copies", "lends")):
            if getattr(layer.config, key):
                raise ConfigurationError(
                    f"{plan.mesh.equation}: expert.{key} {what} whole experts, and those of {name} are sharded",
                    hint=f"leave expert.{key} out, or use mesh.dp in place of mesh.shard",
                )
    for name in (*(f"{one}.experts" for one in layers), *placed):
        if name in ignored:
            raise ConfigurationError(
                f"{plan.mesh.equation}: fsdp.ignored_modules names the experts {name}, which differ between ranks",
                hint="leave them out of fsdp.ignored_modules",
            )
