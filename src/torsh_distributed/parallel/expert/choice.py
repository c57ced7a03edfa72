"""What a plan means for a model with experts, and what it may not ask of one without."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.expert.layer import MoELayer, moe_layers
from torsh_distributed.parallel.expert.strategy import ExpertDataParallel
from torsh_distributed.parallel.mesh import Mesh
from torsh_distributed.parallel.strategy import check_one_device
from torsh_distributed.plan import Plan


def expert_strategy(model: nn.Module, plan: Plan) -> ExpertDataParallel | None:
    """The strategy for a model with experts; None for one without, or where its parameters are sharded by another.

    Every rank calls this. Raises ConfigurationError where plan and model do not go together.
    """
    layers = moe_layers(model)
    _check(layers, plan)
    if not layers:
        return None
    mesh = Mesh(plan.mesh, device_type=check_one_device(model).type)
    if plan.mesh.shard > 1:
        for layer in layers.values():
            layer.spread(mesh.group("ep"), mesh.data_group)
        return None
    return ExpertDataParallel(model, plan.ddp, plan.distributed, mesh=mesh)


def _check(layers: Mapping[str, MoELayer], plan: Plan) -> None:
    asked = sorted(plan.expert.model_fields_set)
    if not layers:
        if plan.mesh.ep > 1 or asked:
            what = f"mesh.ep {plan.mesh.ep}" if plan.mesh.ep > 1 else f"expert.{asked[0]}"
            raise ConfigurationError(
                f"{what} is for models with experts, and this one has none",
                hint="put a MoELayer into the model, or leave it out of the plan",
            )
        return
    for name, layer in layers.items():
        for key in asked:
            wanted, built = getattr(plan.expert, key), getattr(layer.config, key)
            if wanted != built:
                raise ConfigurationError(
                    f"expert.{key} is {wanted} in the plan, but {built} in the layer {name}",
                    hint="build the layer from the plan: MoELayer(input_dim, hidden_dim, plan.expert)",
                )
    if plan.mesh.shard > 1 and (plan.mesh.ep > 1 or plan.fsdp.strategy == "shard_optimizer"):
        raise ConfigurationError(
            f"{plan.mesh.equation}: experts spread over ep, or a sharded optimizer, do not go with mesh.shard yet",
            hint="set mesh.shard = 1, or mesh.ep = 1 and another fsdp.strategy",
        )
    if plan.offload.enabled:
        raise ConfigurationError(
            "offload.enabled does not go with experts yet", hint="leave offload out, or spread experts over more ranks"
        )
