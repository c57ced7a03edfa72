"""`deepspeed.initialize` and `add_config_arguments`: how a script begins."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import FeatureNotAvailable
from torsh_distributed.migrate.deepspeed.deepspeed_errors import require
from torsh_distributed.migrate.deepspeed.engine_setup import find_config, make_engine, settings_of
from torsh_distributed.migrate.deepspeed.initialize_group import init_distributed, local_rank
from torsh_distributed.migrate.deepspeed.pipe.pipeline_engine import make_pipeline_engine
from torsh_distributed.migrate.deepspeed.pipe.pipeline_module import PipelineModule
from torsh_distributed.migrate.deepspeed.training.deepspeed_engine import DeepSpeedEngine


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[..., Optimizer] | None = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    mesh_param: tuple[int, ...] | None = None,
    config_params: Mapping[str, Any] | None = None,
) -> tuple[Any, Any, Any, Any]:
    """The engine of `model`, its optimizer, its data loader (or None) and its scheduler; every rank calls this.

    The config is a file or a dict, here or in `args.deepspeed_config`. `optimizer` may be a function from parameters to
    one and `lr_scheduler` one from an optimizer to a scheduler; without them the config's sections are used.
    """
    require(model is not None, "deepspeed.initialize requires a model", hint="pass model=…")
    assert model is not None, "checked above"
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    _require_data_parallel(model, mpu, mesh_param)
    # After the ranks have met: scripts write the file just before, on one rank or on all of them at the same path.
    stages = model.num_stages if isinstance(model, PipelineModule) else 1
    given = config if config is not None else config_params
    values = find_config(args, given, data_ranks=process_group.world_size() // stages)
    if hasattr(args, "local_rank"):
        args.local_rank = local_rank()
    engine: DeepSpeedEngine
    if isinstance(model, PipelineModule):
        engine = make_pipeline_engine(
            model,
            values,
            optimizer=optimizer,
            model_parameters=model_parameters,
            lr_scheduler=lr_scheduler,
            training_data=training_data,
            collate_fn=collate_fn,
        )
    else:
        engine = make_engine(
            model,
            settings_of(values, process_group.world_size()),
            optimizer=optimizer,
            model_parameters=model_parameters,
            lr_scheduler=lr_scheduler,
            training_data=training_data,
            collate_fn=collate_fn,
        )
    if mpu is not None:
        engine.mpu = mpu
    engine._config = values
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


_SIZES = {
    "get_tensor_model_parallel_world_size": "mesh.tp",
    "get_slice_parallel_world_size": "mesh.tp",
    "get_model_parallel_world_size": "mesh.tp",
    "get_pipeline_model_parallel_world_size": "mesh.pp",
    "get_pipe_parallel_world_size": "mesh.pp",
    "get_sequence_parallel_world_size": "mesh.cp",
    "get_expert_model_parallel_world_size": "mesh.ep",
}
"""What an `mpu` such as Megatron's says of the ranks that share samples, and the axis of a plan for it."""


def _require_data_parallel(model: nn.Module, mpu: Any, mesh_param: tuple[int, ...] | None) -> None:
    """Refuse an `mpu` or a mesh in which some ranks share their samples: this engine spreads data over all of them.

    Megatron passes its `mpu` whenever it runs without pipeline stages, mostly with one rank to a model.
    """
    require(
        mpu is None or not isinstance(model, PipelineModule),
        "mpu must be None with pipeline parallelism",
        hint="leave mpu out: the PipelineModule's topology says where ranks stand",
    )
    found = [(f"mpu.{name}()", int(getattr(mpu, name)()), axis) for name, axis in _SIZES.items() if hasattr(mpu, name)]
    found += [(f"mesh_param[{index}]", size, "mesh.cp") for index, size in enumerate(mesh_param or ()) if index]
    for name, size, axis in found:
        if size > 1:
            raise FeatureNotAvailable(
                f"{name} is {size}: this engine spreads data over all ranks, and does not know layers that ranks share",
                hint=f"use a plan with {axis}, through torsh_distributed.parallelize",
            )
    num_ranks = process_group.world_size()
    told = mpu.get_data_parallel_world_size() if hasattr(mpu, "get_data_parallel_world_size") else num_ranks
    require(
        told == num_ranks and (mesh_param is None or mesh_param[0] == num_ranks),
        "mpu and mesh_param have all ranks of the job in their data parallel group",
        mpu=told,
        mesh_param=mesh_param,
        num_ranks=num_ranks,
    )


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed`, `--deepspeed_config` and their old spellings to a script's parser."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument(
        "--deepspeed", action="store_true", help="Enable DeepSpeed (for the script; the engine does not read it)"
    )
    group.add_argument("--deepspeed_config", default=None, type=str, help="DeepSpeed json configuration file.")
    group.add_argument("--deepscale", action="store_true", help="Old spelling of --deepspeed")
    group.add_argument("--deepscale_config", default=None, type=str, help="Old spelling of --deepspeed_config")
    return parser
