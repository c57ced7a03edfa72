"""What a run reports, saves and recomputes: monitors, checkpoints, activations, compilation, curriculum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torsh_distributed.errors import TorshError
from torsh_distributed.migrate.deepspeed.config.translation import Translation

_CURRICULUM = "data_efficiency.data_sampling.curriculum_learning"
_IN_BACKGROUND = "checkpoints are written in the background"
_NOT_QUANTIZED = "models are not pruned or quantized while they train: see torchao"


def translate_run(one: Translation) -> None:
    """Sections that have a counterpart only once they are on."""
    _monitors(one)
    _checkpoints(one)
    if one.get("activation_checkpointing.cpu_checkpointing"):
        one.honoured("activation_checkpointing.cpu_checkpointing", one.set("activation.offload_to_cpu", True))
    else:
        one.honoured("activation_checkpointing.cpu_checkpointing")
    one.honoured("compile.deepcompile")
    if one.is_on("compile"):
        one.equivalent("compile.deepcompile", one.set("compile.enabled", True), "torch.compile, layer by layer")
    _curriculum(one)
    if one.is_on("progressive_layer_drop"):
        call = "migrate.deepspeed.ProgressiveLayerDrop"
        for name in ("enabled", "theta", "gamma"):
            one.equivalent(f"progressive_layer_drop.{name}", call, "the model has to skip layers, as with DeepSpeed")
    for key in one.values.get("compression_training") or {}:
        one.refuse(f"compression_training.{key}", _NOT_QUANTIZED)


def _monitors(one: Translation) -> None:
    exports: list[str] = []
    for section in ("tensorboard", "csv_monitor"):
        for name in ("enabled", "output_path", "job_name"):
            one.honoured(f"{section}.{name}", "", "" if one.is_on(section) else "off")
        if one.is_on(section):
            path = Path(str(one.get(f"{section}.output_path")) or ".") / str(one.get(f"{section}.job_name"))
            exports.append(f"tensorboard:{path}" if section == "tensorboard" else f"csv:{path}.csv")
            for name in ("enabled", "output_path", "job_name"):
                one.honoured(f"{section}.{name}", f"observe.exports = [{exports[-1]}]")
    if one.is_on("wandb"):
        exports.append(f"wandb:{one.get('wandb.project')}")
        for name in ("enabled", "project"):
            one.honoured(f"wandb.{name}", f"observe.exports = [{exports[-1]}]")
    if exports:
        one.set("observe.exports", tuple(exports))


def _checkpoints(one: Translation) -> None:
    if one.get("checkpoint.use_node_local_storage"):
        one.honoured("checkpoint.use_node_local_storage", one.set("checkpoint.per_node", True))
    else:
        one.honoured("checkpoint.use_node_local_storage")
    if one.get("checkpoint.writer.decoupled"):
        one.honoured("checkpoint.writer.decoupled", one.set("checkpoint.async_save", True))
    else:
        one.honoured("checkpoint.writer.decoupled")
    if one.is_on("nebula"):
        for name in one.values["nebula"]:
            one.equivalent(
                f"nebula.{name}", "checkpoint.async_save = true", "checkpoints are written in the background"
            )
    one.equivalent("datastates_ckpt", "checkpoint.async_save = true", "checkpoints are written in the background")


def _curriculum(one: Translation) -> None:
    for section in ("data_efficiency", "data_efficiency.data_sampling", "data_efficiency.data_routing"):
        one.honoured(f"{section}.enabled")
    for section in (_CURRICULUM, "curriculum_learning"):
        if not one.is_on(section):
            continue
        given: dict[str, Any] = one.get(section)
        metrics = given.get("curriculum_metrics", {"": given})
        for name, metric in metrics.items():
            _check_metric(one, f"{section}.curriculum_metrics.{name}" if name else section, metric)
        for key in given:
            one.equivalent(
                f"{section}.{key}", "migrate.deepspeed.CurriculumSchedule", "says how hard the samples of a step may be"
            )


def _check_metric(one: Translation, key: str, metric: Any) -> None:
    from torsh_distributed.migrate.deepspeed.schedules.curriculum import CurriculumSchedule  # no torch in it

    if not isinstance(metric, dict):
        one.wrong(key, f"{key} must be a section of keys; got {metric!r}")
        return
    try:
        CurriculumSchedule(metric)
    except TorshError as error:
        one.wrong(key, f"{key}: {error.message}", error.hint or "")
