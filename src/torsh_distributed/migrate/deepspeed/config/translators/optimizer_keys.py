"""The optimizer and scheduler of a config, as the calls that make them: a plan has neither."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torsh_distributed.migrate.deepspeed.config.translation import Translation
from torsh_distributed.migrate.report import Verdict
from torsh_distributed.plan.problems import did_you_mean

_ADAM = ("lr", "betas", "eps", "weight_decay", "bias_correction", "amsgrad", "torch_adam", "adam_w_mode", "fused")
OPTIMIZER_PARAMS: Mapping[str, tuple[str, ...]] = {
    "adam": _ADAM,
    "adamw": _ADAM,
    "lamb": ("lr", "betas", "eps", "weight_decay", "bias_correction", "max_coeff", "min_coeff", "eps_inside_sqrt"),
    "lion": ("lr", "betas", "weight_decay"),
    "adagrad": ("lr", "eps", "weight_decay", "lr_decay", "initial_accumulator_value"),
    "muon": (
        *("lr", "muon_lr", "adam_lr", "momentum", "betas", "eps", "weight_decay", "ns_method", "ns_steps", "nesterov"),
        *("adam_betas", "adam_eps", "adam_weight_decay"),
    ),
}
"""Optimizers that DeepSpeed has itself, with their params. Any other name is a class of torch.optim."""
_REFUSED = {
    "onebitadam": "gradients are compressed by the plan, not by an optimizer: AdamW with compress.method = sign",
    "onebitlamb": "gradients are compressed by the plan, not by an optimizer: Lamb with compress.method = sign",
    "zerooneadam": "gradients are compressed by the plan, not by an optimizer: AdamW with compress.method = sign",
    "muadam": "use the optimizers of the mup package themselves",
    "muadamw": "use the optimizers of the mup package themselves",
    "musgd": "use the optimizers of the mup package themselves",
}
_TORCH = (
    *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam", "RAdam"),
    *("RMSprop", "Rprop", "SGD", "SparseAdam"),
)

_WARMUP = {"warmup_min_lr": False, "warmup_max_lr": False, "warmup_num_steps": False, "warmup_type": False}
SCHEDULE_PARAMS: Mapping[str, Mapping[str, bool]] = {
    "LRRangeTest": dict.fromkeys(
        (
            "lr_range_test_min_lr",
            "lr_range_test_step_size",
            "lr_range_test_step_rate",
            "lr_range_test_staircase",
            "last_batch_iteration",
        ),
        False,
    ),
    "OneCycle": {
        "cycle_min_lr": True,
        "cycle_max_lr": True,
        **dict.fromkeys(
            (
                "decay_lr_rate",
                "cycle_first_step_size",
                "cycle_second_step_size",
                "cycle_first_stair_count",
                "cycle_second_stair_count",
                "decay_step_size",
                "cycle_momentum",
                "cycle_min_mom",
                "cycle_max_mom",
                "decay_mom_rate",
                "last_batch_iteration",
            ),
            False,
        ),
    },
    "WarmupLR": {**_WARMUP, "last_batch_iteration": False},
    "WarmupDecayLR": {"total_num_steps": True, **_WARMUP, "last_batch_iteration": False},
    "WarmupCosineLR": {
        "total_num_steps": True,
        "warmup_min_ratio": False,
        "warmup_num_steps": False,
        "cos_min_ratio": False,
        "warmup_type": False,
        "last_batch_iteration": False,
    },
}
"""Schedules with their params, and whether each is required. Here too, because reading a config imports no torch."""


def translate_optimizer(one: Translation) -> None:
    """Each param is in the call that `optimizer.type` shows."""
    if one.has("optimizer.type"):
        _optimizer(one, str(one.get("optimizer.type")), one.get("optimizer.params") or {})
    elif one.has("optimizer"):
        one.wrong("optimizer.type", "optimizer has no type", "name the optimizer, such as AdamW")
    if one.has("scheduler.type"):
        _scheduler(one, str(one.get("scheduler.type")), one.get("scheduler.params") or {})
    elif one.has("scheduler"):
        one.wrong("scheduler.type", "scheduler has no type", f"it is one of {', '.join(SCHEDULE_PARAMS)}")


def _optimizer(one: Translation, kind: str, params: Mapping[str, Any]) -> None:
    name = kind.lower()
    if "max_grad_norm" in params:
        one.wrong(
            "optimizer.params.max_grad_norm",
            "optimizer.params.max_grad_norm is not a param of an optimizer",
            "clip with gradient_clipping, at the top of the config",
        )
        return
    if name in _REFUSED:
        _give_all(one, params, Verdict.REFUSED, "", _REFUSED[name])
        return
    if name not in OPTIMIZER_PARAMS and kind not in _TORCH:
        known = [*OPTIMIZER_PARAMS, *_TORCH]
        hint = did_you_mean(kind, known) or f"known: {', '.join(known)}"
        one.wrong("optimizer.type", f"optimizer.type {kind!r} is neither DeepSpeed's nor a class of torch.optim", hint)
        return
    for param in params:
        if name in OPTIMIZER_PARAMS and param not in OPTIMIZER_PARAMS[name]:
            hint = did_you_mean(param, OPTIMIZER_PARAMS[name]) or f"it has: {', '.join(OPTIMIZER_PARAMS[name])}"
            one.wrong(f"optimizer.params.{param}", f"optimizer.params.{param} is not a param of {kind}", hint)
    call, reason = _call(kind, params)
    _give_all(one, params, Verdict.HONOURED if not reason else Verdict.EQUIVALENT, call, reason)
    if isinstance(params.get("lr"), int | float) and params["lr"] > 0:
        one.set("training.learning_rate", float(params["lr"]))
    if name in ("adam", "adamw") and params.get("bias_correction") is False:
        one.refuse("optimizer.params.bias_correction", "torch's Adam always corrects the bias: write true")


def _call(kind: str, params: Mapping[str, Any]) -> tuple[str, str]:
    """The call that makes the optimizer, and what is not obvious about it."""
    name = kind.lower()
    given = {key: value for key, value in params.items() if key not in ("torch_adam", "adam_w_mode", "bias_correction")}
    if name in ("adam", "adamw"):
        is_decoupled = name == "adamw" or params.get("adam_w_mode", True)
        if "weight_decay" not in given and not params.get("torch_adam", False):
            given["weight_decay"] = 0
        reason = "DeepSpeed's Adam decays weights as AdamW does" if name == "adam" and is_decoupled else ""
        return _written(f"torch.optim.{'AdamW' if is_decoupled else 'Adam'}", given), reason
    if name in ("lamb", "lion"):
        return _written(f"migrate.deepspeed: {kind}", given), ""
    if name == "adagrad":
        return _written("torch.optim.Adagrad", given), ""
    if name == "muon":
        return _written("torch.optim.Muon", given), "matrices are Muon's, embeddings, heads and vectors Adam's"
    return _written(f"torch.optim.{kind}", given), ""


def _scheduler(one: Translation, kind: str, params: Mapping[str, Any]) -> None:
    if kind not in SCHEDULE_PARAMS:
        hint = did_you_mean(kind, SCHEDULE_PARAMS) or f"it has: {', '.join(SCHEDULE_PARAMS)}"
        one.wrong("scheduler.type", f"scheduler.type {kind!r} is not a schedule of DeepSpeed", hint)
        return
    known = SCHEDULE_PARAMS[kind]
    for param in params:
        if param not in known:
            hint = did_you_mean(param, known) or f"it has: {', '.join(known)}"
            one.wrong(f"scheduler.params.{param}", f"scheduler.params.{param} is not a param of {kind}", hint)
    missing = [param for param, is_required in known.items() if is_required and param not in params]
    if missing:
        one.wrong("scheduler.params", f"scheduler.params lacks {', '.join(missing)}, which {kind} needs")
    call = _written(f"migrate.deepspeed.{kind}", params, "optimizer")
    one.honoured("scheduler.type", call, "step it after every update")
    for param in params:
        one.honoured(f"scheduler.params.{param}", f"migrate.deepspeed.{kind}")


def _give_all(one: Translation, params: Mapping[str, Any], verdict: Verdict, means: str, reason: str) -> None:
    one.give("optimizer.type", verdict, means, reason)
    for param in params:
        short = means.partition("(")[0]
        one.give(f"optimizer.params.{param}", verdict, short, reason if verdict is Verdict.REFUSED else "")


def _written(name: str, arguments: Mapping[str, Any], first: str = "model.parameters()") -> str:
    shown = [f"{key}={tuple(value) if isinstance(value, list) else value!r}" for key, value in arguments.items()]
    return f"{name}({', '.join([first, *shown])})"
