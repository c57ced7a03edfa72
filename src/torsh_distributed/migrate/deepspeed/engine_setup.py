"""From a model and a config to an engine: cast, optimizer, plan, `parallelize`, engine."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import ConfigurationError, FeatureNotAvailable
from torsh_distributed.migrate.deepspeed.config.deepspeed_config import DeepSpeedConfig
from torsh_distributed.migrate.deepspeed.config.script_config import ScriptConfig
from torsh_distributed.migrate.deepspeed.deepspeed_errors import DeepSpeedMistake, require
from torsh_distributed.migrate.deepspeed.initialize_group import rank_device
from torsh_distributed.migrate.deepspeed.moe.moe_layer import configure_moe_param_groups, has_moe_layers
from torsh_distributed.migrate.deepspeed.moe.stacked_modules import mark_experts, spread_degree
from torsh_distributed.migrate.deepspeed.ops import DeepSpeedCPUAdam, FusedAdam, FusedLamb, FusedLion
from torsh_distributed.migrate.deepspeed.schedules.script_schedule import choose_scheduler
from torsh_distributed.migrate.deepspeed.training.deepspeed_engine import DeepSpeedEngine
from torsh_distributed.migrate.deepspeed.training.loss_scales import make_scaler
from torsh_distributed.migrate.deepspeed.training.master_weights import MasterWeights
from torsh_distributed.migrate.deepspeed.training.microbatch_loop import cast_params
from torsh_distributed.migrate.deepspeed.training.run_settings import RunSettings
from torsh_distributed.migrate.deepspeed.training.sparse_embeddings import average_dense
from torsh_distributed.migrate.deepspeed.training.untrained_model import untrained_core
from torsh_distributed.migrate.deepspeed.training.update_step import UpdateStep
from torsh_distributed.migrate.deepspeed.zero.gathered_parameters import external_names, gather_external
from torsh_distributed.migrate.deepspeed.zero.kept_in_place import keep_in_place
from torsh_distributed.migrate.deepspeed.zero.leaf_modules import give_all_gradients, wrapping_of
from torsh_distributed.migrate.deepspeed.zero.optimizer_kinds import mark_optimizer, refuse_untested
from torsh_distributed.migrate.deepspeed.zero.param_access import give_access
from torsh_distributed.migrate.deepspeed.zero.script_marks import give_marks
from torsh_distributed.parallel.offload.storage.tiers import DiskTier
from torsh_distributed.plan import Plan
from torsh_distributed.train.assemble import parallelize
from torsh_distributed.train.engine import Engine

_log = logging.getLogger(__name__)

_OWN_WAYS = {
    "gradient_allreduce_op",
    "fp16.fp16_master_weights_and_grads",
    "bf16.bf16_master_weights_and_grads",
    "bf16.bf16_optimizer_states",
}
"""Keys that a plan has no counterpart of, and this engine has."""
_OWN_PARTS = ("zero_optimization.offload_", "zero_optimization.cpu_offload", "optimizer.", "scheduler.", "comet.")
"""Beginnings of such keys: the engine has its own optimizers and monitors, and offloads as DeepSpeed does."""
_BOTH = (
    "Not sure how to proceed, we were given deepspeed configs in the deepspeed arguments and deepspeed.initialize()"
    " function call"
)
_OTHER_ENGINES = {
    "compression_training": "quantise or prune with torchao",
    "eigenvalue": "leave it out",
    "quantize_training": "quantise with torchao",
    "amp": "use bf16 or torch_autocast",
}
"""Sections that change what is trained, in ways that this engine does not have."""
_WITHOUT_EFFECT = {
    "hybrid_engine": "engine.generate runs the module that is trained",
    "autotuning": "`torsh plan` and `torsh tune` look for settings",
    "nebula": "checkpoints are written by this engine itself",
    "sparse_attention": "the engine leaves attention to the model",
    "weight_quantization": "it is for inference",
    "zero_optimization.zero_quantized_nontrainable_weights": "frozen weights are gathered as they are",
}
"""Sections and keys that change no loss: a warning says what is done instead."""


def find_config(args: Any, given: Any, *, data_ranks: int) -> ScriptConfig:
    """The one config among a script's arguments and those of `initialize`, for this number of data parallel ranks."""
    old = getattr(args, "deepscale_config", None)
    if old is not None:
        require(
            getattr(args, "deepspeed_config", None) is None,
            "Not sure how to proceed, we were given both a deepscale_config and deepspeed_config",
        )
    named = old if old is not None else getattr(args, "deepspeed_config", None)
    require(named is None or given is None, _BOTH, hint="give the config in one place")
    chosen = given if given is not None else named
    require(
        chosen is not None,
        "DeepSpeed requires --deepspeed_config to specify configuration file",
        hint="pass config=… to initialize(), or --deepspeed_config to the script",
    )
    assert chosen is not None, "checked above"
    found = ScriptConfig(chosen.values if isinstance(chosen, DeepSpeedConfig) else chosen, data_ranks=data_ranks)
    _refuse_other_engines(found)
    return found


def settings_of(config: DeepSpeedConfig, num_ranks: int, *, is_pipeline: bool = False) -> RunSettings:
    """A config for a world in which `num_ranks` ranks have their own part of every batch."""
    try:
        batch = config.batch(num_ranks)
    except ConfigurationError as error:
        raise DeepSpeedMistake(error.message, hint=error.hint, **error.context) from error
    settings = RunSettings(config.values, batch, num_ranks)
    settings.plan = None if is_pipeline else _plan_of(config)
    return settings


def _plan_of(config: DeepSpeedConfig) -> Plan:
    """The config as a plan; what this engine cannot do, and has no way of its own for, is refused, all at once."""
    plan, report = config.to_plan()
    others = (*_OWN_PARTS, *_WITHOUT_EFFECT)
    refused = [entry for entry in report.refused if entry.key not in _OWN_WAYS and not entry.key.startswith(others)]
    if refused:
        raise FeatureNotAvailable(
            "; ".join(f"{entry.key} = {entry.value}: {entry.reason}" for entry in refused),
            hint="change these keys of the DeepSpeed config",
            keys=[entry.key for entry in refused],
        )
    split = [axis for axis in ("tp", "pp", "cp", "ep") if getattr(plan.mesh, axis) > 1]
    if split:
        raise FeatureNotAvailable(
            f"this engine spreads data over all ranks; the config also splits the model (mesh.{split[0]} of a plan)",
            hint="train with torsh_distributed.parallelize and the plan that `torsh migrate` writes",
        )
    return plan


def _refuse_other_engines(config: ScriptConfig) -> None:
    """Sections that ask for another engine than ours, and what has no effect in ours: a warning, or with strict too."""
    for name, hint in {**_OTHER_ENGINES, **_WITHOUT_EFFECT}.items():
        if not _is_on(config.get(name), is_on_by_itself=name in ("sparse_attention", "weight_quantization")):
            continue
        if name in _OTHER_ENGINES or config.is_strict:
            raise FeatureNotAvailable(f"{name} of a DeepSpeed config is not supported", hint=hint, key=name)
        if config.global_rank == 0:
            _log.warning("%s of the DeepSpeed config has no effect: %s", name, hint)


def _is_on(value: Any, *, is_on_by_itself: bool) -> bool:
    return bool(value.get("enabled", is_on_by_itself)) if isinstance(value, Mapping) else value is True


_COMPRESSED = ("onebitadam", "onebitlamb", "zerooneadam")
_MUP = {"muadam": "MuAdam", "muadamw": "MuAdamW", "musgd": "MuSGD"}


def optimizer_from_config(settings: RunSettings, params: Iterable[Any], module: nn.Module) -> Optimizer:
    """The optimizer over `params`, which may be groups.

    "Adam" is AdamW unless `adam_w_mode` is false, and weight decay is 0 unless given, as in DeepSpeed.
    """
    name = settings.value("optimizer.type")
    require(
        name is not None,
        "there is no optimizer: the config has no section optimizer, and initialize() got none",
        hint='pass optimizer=…, or add {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}',
    )
    options = {key: _plain(value) for key, value in dict(settings.value("optimizer.params", {})).items()}
    _refuse_auto(options)
    if "max_grad_norm" in options:
        raise ConfigurationError(
            "'max_grad_norm' is not supported as an optimizer parameter",
            hint="use the key gradient_clipping at the top of the config",
        )
    lowered = str(name).lower()
    given = list(params)
    if lowered in ("adam", "adamw"):
        return _adam(lowered, options, given, settings)
    if lowered in _COMPRESSED:
        raise FeatureNotAvailable(
            f"optimizer.type {name} compresses gradients in an optimizer of its own, which is not part of this engine",
            hint="use AdamW, and compress with a plan (compress.method) through torsh_distributed.parallelize",
        )
    if lowered in _MUP:
        return _from_mup(_MUP[lowered], given, options)
    if lowered == "lamb":
        return FusedLamb(given, **options)
    if lowered == "lion":
        return FusedLion(given, **options)
    if lowered == "muon":
        return _muon(given, options, module)
    if lowered == "adagrad":
        return torch.optim.Adagrad(given, **options)
    kind = getattr(torch.optim, str(name), None)
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise ConfigurationError(
            f"optimizer.type {name} is neither a name of DeepSpeed nor a class of torch.optim",
            hint="names of torch.optim are written as there: SGD, RMSprop",
        )
    return kind(given, **options)


def _adam(name: str, options: dict[str, Any], params: list[Any], settings: RunSettings) -> Optimizer:
    is_decoupled = bool(options.pop("adam_w_mode", True)) or name == "adamw"
    options.pop("fp32_optimizer_states", None)  # they always are
    if options.pop("torch_adam", False):
        return (torch.optim.AdamW if is_decoupled else torch.optim.Adam)(params, **options)
    if settings.offloads_optimizer:
        return DeepSpeedCPUAdam(params, adamw_mode=is_decoupled, **options)
    return FusedAdam(params, adam_w_mode=is_decoupled, **options)


def _muon(params: list[Any], options: dict[str, Any], module: nn.Module) -> Optimizer:
    """Muon for matrices, Adam for the rest."""
    from torsh_distributed.migrate.deepspeed.ops import MuonWithAuxAdam

    names = {id(param): name for name, param in module.named_parameters()}
    optimizer = MuonWithAuxAdam.from_config(params, options, names)
    # Of ZeRO's shards it gathers what it needs itself; of layers that are split otherwise it cannot.
    optimizer.torsh_needs = "elements"
    return optimizer


def _from_mup(name: str, params: list[Any], options: dict[str, Any]) -> Optimizer:
    try:
        import mup  # type: ignore[import-not-found]  # not a dependency
    except ImportError as error:
        raise FeatureNotAvailable(f"optimizer.type {name} needs the package mup", hint="pip install mup") from error
    made: Optimizer = getattr(mup, name)(params, **options)
    return made


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _refuse_auto(options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        if value == "auto":
            raise ConfigurationError(
                f'optimizer.params.{key} is "auto", which only a trainer fills in', hint="write a number", key=key
            )


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
    require(
        not any(hasattr(param, "to_local") for param in model.parameters()),
        "the model is sharded already, by another engine",
        hint="give each engine a model of its own; copy weights inside deepspeed.zero.GatheredParameters",
    )
    device = rank_device()
    if not settings.offloads_params:
        model.to(device)
    buffer_dtype = _BUFFER_DTYPES.get(settings.value("data_types.buffer_dtype"))
    cast_params(model, settings.dtype, buffer_dtype)
    is_trained = optimizer is not None or settings.value("optimizer.type") is not None
    externals = external_names(model)
    inner: Optimizer | None = None
    if is_trained:
        if settings.has_fp32_shards:
            cast_params(model, torch.float32, None)  # they start from rounded values, as masters do
        inner = choose_optimizer(settings, model, optimizer, model_parameters)
        refuse_untested(inner, settings)
        average_dense(model, inner, settings)
        core = spread(model, settings, inner)
        mark_optimizer(core.optimizer, settings)
        mark_experts(core.unwrapped)
    else:
        core = untrained_core(model, core_plan(settings, model, is_trained=False))
    gather_external(core.unwrapped, externals)
    give_all_gradients(core.unwrapped)
    scaler = make_scaler(settings.section("fp16") if is_trained else {}, is_zero=settings.stage > 0)
    update = UpdateStep(core, settings, scaler)
    give_access(core, marks=settings.stage == 3)
    if settings.stage == 3:
        give_marks(core)
    keep_in_place(core.unwrapped)
    engine = DeepSpeedEngine(
        core,
        settings,
        update,
        lr_scheduler=None if inner is None else choose_scheduler(settings, lr_scheduler, inner, core.optimizer),
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
    if trained and has_moe_layers(model)[0]:
        trained = configure_moe_param_groups(trained)
    return optimizer_from_config(settings, trained, model)


def spread(model: nn.Module, settings: RunSettings, inner: Optimizer) -> Engine:
    """The model over the world as the config's stage says, with fp32 masters where it computes in 16 bits."""
    on_host = settings.offloads_optimizer and rank_device().type != "cpu"
    disk = _disk_of(settings)
    has_masters = (settings.dtype is not torch.float32 and not settings.has_fp32_shards) or on_host or disk is not None
    experts = spread_degree(model, inner, settings)
    optimizer = inner
    if has_masters:
        optimizer = MasterWeights(inner, on_host=on_host, dtype=settings.master_dtype, disk=disk)
    for group in optimizer.param_groups:
        # A frozen parameter has no master, and groups that became empty are dropped, as in DeepSpeed.
        group["params"] = [param for param in group["params"] if param.requires_grad]
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    core = parallelize(model, optimizer, core_plan(settings, model, experts=experts))
    if isinstance(core.optimizer, MasterWeights):
        core.optimizer.make_masters(core.strategy.state_parts().like)
    return core


def _disk_of(settings: RunSettings) -> DiskTier | None:
    """Where the optimizer's state is kept with `device` nvme: a file of this rank under `nvme_path`, of any size."""
    section = settings.value("zero_optimization.offload_optimizer")
    if not isinstance(section, Mapping) or section.get("device") != "nvme":
        return None
    folder = Path(str(section["nvme_path"]))
    folder.mkdir(parents=True, exist_ok=True)
    return DiskTier(folder, sys.maxsize)


def core_plan(settings: RunSettings, model: nn.Module, *, is_trained: bool = True, experts: int = 1) -> Plan:
    """The plan of the Engine under a DeepSpeed engine; `experts`: ranks that the experts of a layer are on.

    Precision and clipping are not in it: the module itself is in 16 bits, and the engine clips masters. Buffers stay
    each rank's own, as in DeepSpeed.
    """
    if settings.offloads_params and rank_device().type != "cpu":
        raise FeatureNotAvailable(
            "zero_optimization.offload_param is not part of this engine on a GPU",
            hint="offload the optimizer alone, or train with a plan that has offload.enabled",
        )
    if settings.value("zero_optimization.offload_param.device") == "nvme" and process_group.rank() == 0:
        _log.warning(
            "zero_optimization.offload_param.device nvme has no effect on CPU ranks: parameters stay in memory; a plan"
            " with offload.disk_dir keeps them on disk"
        )
    num_ranks = process_group.world_size()
    sections: dict[str, Any] = {
        "mesh": {"dp": -1},
        "ddp": {"broadcast_buffers": False},
        "precision": {"reduce_dtype": settings.reduce_dtype},
    }
    if is_trained and settings.has_fp32_shards:
        sections["precision"] = {"dtype": "bf16", "reduce_dtype": "bf16" if settings.reduce_dtype == "same" else "fp32"}
    if experts > 1:
        sections["mesh"] = {"dp": -1, "ep": experts}
    if settings.stage and num_ranks > experts:
        sections["mesh"] = {"dp": 1, "shard": -1, "ep": experts}
        # Beside experts that differ between ranks, the state of an optimizer is not sharded without its parameters.
        # Replicas have no fp32 gradients beside 16-bit parameters; shards of these do, with the numbers of stage 1.
        adds_up_apart = settings.stage == 1 and is_trained and settings.has_fp32_shards
        stage = 2 if experts > 1 or adds_up_apart else settings.stage
        sections["fsdp"] = {"strategy": STRATEGIES[stage], **(wrapping_of(model) if stage > 1 else {})}
        if settings.plan is not None:
            _take_over(sections, settings.plan)
    return Plan.from_dict(sections)


def _take_over(sections: dict[str, Any], plan: Plan) -> None:
    """What a plan of the config has beside its stage: groups of shards (MiCS), formats of what is sent (ZeRO++)."""
    if plan.fsdp.strategy == "hybrid_shard":
        sections["mesh"] = {"dp": -1, "shard": plan.mesh.shard}
        sections["fsdp"]["strategy"] = "hybrid_shard"
    sections["fsdp"]["gather_codec"] = plan.fsdp.gather_codec
    if plan.compress.method != "none":
        sections["compress"] = plan.compress.model_dump(exclude_unset=True)
