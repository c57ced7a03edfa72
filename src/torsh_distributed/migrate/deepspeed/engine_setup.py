"""From a model and a config to an engine: cast, optimizer, plan, `parallelize`, engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import FeatureNotAvailable
from torsh_distributed.migrate.deepspeed.deepspeed_errors import require
from torsh_distributed.migrate.deepspeed.initialize_group import rank_device
from torsh_distributed.migrate.deepspeed.schedules.lr_schedules import make_schedule
from torsh_distributed.migrate.deepspeed.training.deepspeed_engine import DeepSpeedEngine
from torsh_distributed.migrate.deepspeed.training.loss_scales import make_scaler
from torsh_distributed.migrate.deepspeed.training.master_weights import MasterWeights
from torsh_distributed.migrate.deepspeed.training.microbatch_loop import cast_params
from torsh_distributed.migrate.deepspeed.training.optimizer_choice import optimizer_from_config
from torsh_distributed.migrate.deepspeed.training.run_settings import RunSettings
from torsh_distributed.migrate.deepspeed.training.update_step import UpdateStep
from torsh_distributed.migrate.deepspeed.zero.external_params import external_names, gather_external
from torsh_distributed.migrate.deepspeed.zero.param_access import give_access
from torsh_distributed.plan import Plan
from torsh_distributed.train.assemble import parallelize
from torsh_distributed.train.engine import Engine

_log = logging.getLogger(__name__)

STRATEGIES = {1: "shard_optimizer", 2: "shard_grad_op", 3: "full_shard"}
"""ZeRO's stages in the words of a plan; stage 0 is replicas."""
_BUFFER_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def make_engine(
    model: nn.Module,
    settings: RunSettings,
    *,
    optimizer: Optimizer | Callable[..., Optimizer] | None,
    model_parameters: Any,
    lr_scheduler: Any,
    training_data: Any,
    collate_fn: Callable[..., Any] | None,
) -> DeepSpeedEngine:
    """The engine of a model that is not a PipelineModule; every rank calls this."""
    device = rank_device()
    if not settings.offloads_params:
        model.to(device)
    buffer_dtype = _BUFFER_DTYPES.get(settings.value("data_types.buffer_dtype"))
    cast_params(model, settings.dtype, buffer_dtype)
    if settings.has_fp32_shards:
        cast_params(model, torch.float32, None)  # they start from rounded values, as masters do
    inner = choose_optimizer(settings, model, optimizer, model_parameters)
    externals = external_names(model)
    core = spread(model, settings, inner)
    gather_external(core.unwrapped, externals)
    scaler = make_scaler(settings.section("fp16"), is_zero=settings.stage > 0)
    update = UpdateStep(core, settings, scaler)
    give_access(core, marks=settings.stage == 3)
    engine = DeepSpeedEngine(
        core,
        settings,
        update,
        lr_scheduler=choose_scheduler(settings, lr_scheduler, inner, core.optimizer),
        training_data=training_data,
        collate_fn=collate_fn,
        client_optimizer=inner if optimizer is not None else None,
    )
    engine.basic_optimizer = inner
    return engine


def choose_optimizer(
    settings: RunSettings,
    model: nn.Module,
    given: Optimizer | Callable[..., Optimizer] | None,
    params: Any,
) -> Optimizer:
    """The script's optimizer, or what its function makes, or the config's."""
    trained = [param for param in model.parameters() if param.requires_grad] if params is None else list(params)
    if isinstance(given, Optimizer):
        return given
    if given is not None:
        made = given(trained)
        require(
            isinstance(made, Optimizer),
            "optimizer is a torch.optim.Optimizer, or a function from parameters to one",
            got=type(made).__name__,
        )
        return made
    return optimizer_from_config(settings, trained, model)


def choose_scheduler(settings: RunSettings, given: Any, inner: Optimizer, outer: Optimizer) -> Any:
    """The script's scheduler, or what its function makes, or the config's; None for a fixed learning rate."""
    if given is not None:
        # A scheduler object has `step`; a function makes one over the optimizer it is called with.
        return given(inner) if callable(given) and not hasattr(given, "step") else given
    kind = settings.value("scheduler.type")
    if kind is None:
        return None
    return make_schedule(kind, settings.value("scheduler.params", {}), outer)


def spread(model: nn.Module, settings: RunSettings, inner: Optimizer) -> Engine:
    """The model over the world as the config's stage says, with fp32 masters where it computes in 16 bits."""
    on_host = settings.offloads_optimizer and rank_device().type != "cpu"
    if settings.value("zero_optimization.offload_optimizer.device") == "nvme":
        _log.warning("zero_optimization.offload_optimizer: state is kept in host memory, not under nvme_path")
    has_masters = (settings.dtype is not torch.float32 and not settings.has_fp32_shards) or on_host
    optimizer = MasterWeights(inner, on_host=on_host, dtype=settings.master_dtype) if has_masters else inner
    for group in optimizer.param_groups:
        # A frozen parameter has no master, and groups that became empty are dropped, as in DeepSpeed.
        group["params"] = [param for param in group["params"] if param.requires_grad]
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    core = parallelize(model, optimizer, core_plan(settings))
    if isinstance(core.optimizer, MasterWeights):
        core.optimizer.make_masters(core.strategy.state_parts().like)
    return core


def core_plan(settings: RunSettings) -> Plan:
    """The plan that the Engine under a DeepSpeed engine has.

    Precision and clipping are not in it: the module itself is in 16 bits, and the engine clips masters. Buffers stay
    each rank's own, as in DeepSpeed.
    """
    if settings.offloads_params and rank_device().type != "cpu":
        raise FeatureNotAvailable(
            "zero_optimization.offload_param is not part of this engine on a GPU",
            hint="offload the optimizer alone, or train with a plan that has offload.enabled",
        )
    num_ranks = process_group.world_size()
    sections: dict[str, Any] = {
        "mesh": {"dp": -1},
        "ddp": {"broadcast_buffers": False},
        "precision": {"reduce_dtype": settings.reduce_dtype},
    }
    if settings.has_fp32_shards:
        sections["precision"] = {"dtype": "bf16", "reduce_dtype": "bf16" if settings.reduce_dtype == "same" else "fp32"}
    if settings.stage and num_ranks > 1:
        sections["mesh"] = {"dp": 1, "shard": -1}
        sections["fsdp"] = {"strategy": STRATEGIES[settings.stage]}
        if settings.plan is not None:
            _take_over(sections, settings.plan)
    return Plan.from_dict(sections)


def _take_over(sections: dict[str, Any], plan: Plan) -> None:
    """What a plan of the config has beside its stage: groups of shards (MiCS), formats of what is sent (ZeRO++)."""
    if plan.fsdp.strategy == "hybrid_shard":
        sections["mesh"] = {"dp": -1, "shard": plan.mesh.shard}
        sections["fsdp"] = {"strategy": "hybrid_shard"}
    sections["fsdp"]["gather_codec"] = plan.fsdp.gather_codec
    if plan.compress.method != "none":
        sections["compress"] = plan.compress.model_dump(exclude_unset=True)
