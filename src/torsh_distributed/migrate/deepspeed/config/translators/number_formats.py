"""fp16, bf16, amp, autocast and the formats of gradients, as [precision]."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torsh_distributed.errors import TorshError
from torsh_distributed.migrate.deepspeed.config.translation import Translation
from torsh_distributed.migrate.deepspeed.config.translators.mesh_keys import is_split
from torsh_distributed.migrate.report import Verdict

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


_NEVER = 2**31 - 1
"""Steps after which a scale that must not grow would."""
_SHORT = {"half": "fp16", "float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32"}


def short_dtype(name: Any) -> str:
    """fp32, fp16 or bf16, for any spelling that DeepSpeed takes."""
    plain = str(name).lower().removeprefix("torch.")
    return _SHORT.get(plain, plain)


def translate_precision(one: Translation) -> None:
    """The formats of computation, then those of gradients on their way."""
    bf16 = "bfloat16" if one.has("bfloat16") else "bf16"
    if one.has("bf16") and one.has("bfloat16"):
        one.wrong("bfloat16", "bf16 and bfloat16 are one section, and both are given", "keep bf16")
    modes = [name for name in ("fp16", bf16, "amp", "torch_autocast") if one.get(f"{name}.enabled")]
    if len(modes) > 1:
        names = " and ".join(f"{name}.enabled" for name in modes)
        one.wrong(modes[1], f"{names} are both true, but a model computes in one format", "keep one of them")
        return
    for name in ("fp16", bf16, "torch_autocast"):
        one.honoured(f"{name}.enabled")
    mode = modes[0] if modes else ""
    if mode == "fp16":
        one.honoured("fp16.enabled", one.set("precision.dtype", "fp16"))
        _loss_scale(one)
    elif mode == bf16:
        one.honoured(f"{bf16}.enabled", one.set("precision.dtype", "bf16"))
    elif mode == "torch_autocast":
        dtype = short_dtype(one.get("torch_autocast.dtype"))
        means = one.set("precision.dtype", dtype)
        one.equivalent("torch_autocast.enabled", means)
        one.equivalent("torch_autocast.dtype", means)
    elif mode == "amp":
        _apex(one)
    _gradients(one, mode if mode != bf16 else "bf16")
    _data_types(one)


def _loss_scale(one: Translation) -> None:
    scale = float(one.get("fp16.loss_scale"))
    if scale:
        means = one.set("precision.init_loss_scale", scale)
        one.set("precision.loss_scale_growth_interval", _NEVER)
        one.equivalent("fp16.loss_scale", means, "it does not grow; after an overflow it halves")
        for name in ("initial_scale_power", "loss_scale_window"):
            one.honoured(f"fp16.{name}", "", "off: the loss scale is fixed")
        return
    one.honoured("fp16.loss_scale", "", "0: the scale follows overflows")
    power, window = int(one.get("fp16.initial_scale_power")), int(one.get("fp16.loss_scale_window"))
    one.honoured("fp16.initial_scale_power", one.set("precision.init_loss_scale", float(2**power)))
    one.honoured("fp16.loss_scale_window", one.set("precision.loss_scale_growth_interval", window))


def _apex(one: Translation) -> None:
    level = str(one.get("amp.opt_level")).upper()
    if level == "O0":
        one.honoured("amp.enabled", "", "O0 is fp32")
        one.honoured("amp.opt_level", "", "fp32")
    elif level == "O1":
        means = one.set("precision.dtype", "fp16")
        one.equivalent("amp.enabled", means, "torch's autocast in place of apex")
        one.equivalent("amp.opt_level", means, "torch's autocast in place of apex")
    else:
        reason = f"apex's {level} keeps weights in fp16: use fp16.enabled or bf16.enabled"
        one.refuse("amp.enabled", reason)
        one.refuse("amp.opt_level", reason)


def _gradients(one: Translation, mode: str) -> None:
    given = one.has("communication_data_type")
    asked = short_dtype(one.get("communication_data_type")) if given else mode if mode in ("fp16", "bf16") else "fp32"
    offload = one.sections.get("offload", {})
    can_choose = not is_split(one) and not offload.get("params") and "compress" not in one.sections
    if asked == "fp32":
        one.honoured("communication_data_type", "", "gradients are fp32")
    elif not can_choose:
        one.equivalent("communication_data_type", "", "gradients travel in fp32 in this layout, which is more exact")
    elif given:
        one.honoured("communication_data_type", one.set("precision.reduce_dtype", asked))
    else:
        one.give_default(
            "communication_data_type",
            asked,
            Verdict.HONOURED,
            one.set("precision.reduce_dtype", asked),
            "DeepSpeed sums gradients in the model's format; fp32 is more exact and twice as large",
        )


def _data_types(one: Translation) -> None:
    kept = one.get("data_types.grad_accum_dtype")
    if kept is None or short_dtype(kept) == "fp32":
        one.honoured("data_types.grad_accum_dtype", "", "gradients are accumulated in fp32")
    else:
        one.equivalent("data_types.grad_accum_dtype", "", "gradients are accumulated in fp32, which is more exact")
    buffers = one.get("data_types.buffer_dtype")
    if buffers is not None:
        one.honoured("data_types.buffer_dtype", one.set("precision.buffer_dtype", short_dtype(buffers)))
