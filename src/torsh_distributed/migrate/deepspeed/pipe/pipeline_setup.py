"""From a PipelineModule and a config to an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from torsh_distributed.comm.groups import process_group
from torsh_distributed.migrate.deepspeed.config.deepspeed_config import DeepSpeedConfig
from torsh_distributed.migrate.deepspeed.deepspeed_errors import require
from torsh_distributed.migrate.deepspeed.engine_setup import choose_optimizer, choose_scheduler
from torsh_distributed.migrate.deepspeed.initialize_config import settings_of
from torsh_distributed.migrate.deepspeed.initialize_group import rank_device
from torsh_distributed.migrate.deepspeed.pipe.pipeline_engine import PipelineEngine
from torsh_distributed.migrate.deepspeed.pipe.pipeline_module import PipelineModule
from torsh_distributed.migrate.deepspeed.training.loss_scales import make_scaler
from torsh_distributed.migrate.deepspeed.training.master_weights import MasterWeights
from torsh_distributed.migrate.deepspeed.training.microbatch_loop import cast_params
from torsh_distributed.migrate.deepspeed.training.run_settings import RunSettings
from torsh_distributed.migrate.deepspeed.training.update_step import UpdateStep
from torsh_distributed.plan import Plan
from torsh_distributed.train.assemble import parallelize


def make_pipeline_engine(
    model: PipelineModule,
    config: DeepSpeedConfig,
    *,
    optimizer: Optimizer | Callable[..., Optimizer] | None,
    model_parameters: Any,
    lr_scheduler: Any,
    training_data: Any,
    collate_fn: Callable[..., Any] | None,
) -> PipelineEngine:
    """The engine of a pipeline; every rank calls this."""
    settings = settings_of(config, process_group.world_size() // model.num_stages, is_pipeline=True)
    require(
        settings.stage < 2,
        "ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism",
        hint="use zero_optimization.stage 0 or 1: a stage is already a part of the model",
    )
    require(model.loss_fn is not None, "a PipelineModule needs loss_fn to be trained", hint="pass loss_fn=…")
    model.to(rank_device())
    model.recompute_layers()
    cast_params(model, settings.dtype, None)
    inner = choose_optimizer(settings, model, optimizer, model_parameters)
    outer = MasterWeights(inner) if settings.dtype is not torch.float32 else inner
    core = parallelize(model, outer, _plan(model, settings), loss_fn=model.loss_fn)
    if isinstance(core.optimizer, MasterWeights):
        core.optimizer.make_masters(core.strategy.state_parts().like)
    return PipelineEngine(
        core,
        settings,
        UpdateStep(core, settings, make_scaler(settings.section("fp16"), is_zero=settings.stage > 0)),
        lr_scheduler=choose_scheduler(settings, lr_scheduler, inner, core.optimizer),
        training_data=training_data,
        collate_fn=collate_fn,
        client_optimizer=inner if optimizer is not None else None,
        source=model,
    )


def _plan(model: PipelineModule, settings: RunSettings) -> Plan:
    """Stages where the module cuts them; a microbatch of the config is one of the schedule.

    Ranks of a stage are neighbours, as in DeepSpeed's topology: the axis `shard` is inside pp, `dp` would be outside.
    """
    mesh = {"pp": model.num_stages, "dp": 1, "shard": -1}
    sections: dict[str, Any] = {
        "mesh": mesh,
        "ddp": {"broadcast_buffers": False},
        "precision": {"reduce_dtype": settings.reduce_dtype},
        "pipeline": {
            "num_microbatches": settings.batch.accumulation,
            **({"balance": "manual", "split_points": list(model.split_points)} if model.num_stages > 1 else {}),
        },
    }
    return Plan.from_dict(sections)
