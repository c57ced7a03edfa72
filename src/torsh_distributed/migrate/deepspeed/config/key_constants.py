"""`deepspeed.runtime.constants`: names of keys and their defaults, as Megatron-style scripts import them.

A constant is a key in capitals, and its default has `_DEFAULT` behind it: both come from the table of keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from torsh_distributed.migrate.deepspeed.config.known_keys import KNOWN
from torsh_distributed.migrate.deepspeed.config.setting import Setting, SettingGroup

_INSIDE = ("fp16", "bf16", "torch_autocast")
"""Sections whose keys have constants that begin with the section."""


class ValidationMode(StrEnum):
    """What is done about tags of checkpoints that differ between ranks."""

    WARN = "WARN"
    IGNORE = "IGNORE"
    FAIL = "FAIL"


def optimizer_names() -> dict[str, Any]:
    """The names of optimizers for `optimizer.type`, each by the name of its constant, and all of them."""
    names = ("adagrad", "adam", "adamw", "lamb", "lion", "muon", "muadam", "muadamw", "musgd")
    return {**{f"{name.upper()}_OPTIMIZER": name for name in names}, "DEEPSPEED_OPTIMIZERS": list(names)}


def key_constants() -> dict[str, Any]:
    """Every constant by its name."""
    found = {
        **_of(KNOWN.settings, ""),
        "TYPE": "type",
        "OPTIMIZER_PARAMS": "params",
        "OPTIMIZER_TYPE_DEFAULT": None,
        "SCHEDULER_PARAMS": "params",
        "SCHEDULER_TYPE_DEFAULT": None,
        "LEGACY_FUSION": "legacy_fusion",
        "MAX_GRAD_NORM": "max_grad_norm",
        "BFLOAT16": "bf16",
        "BFLOAT16_OLD": "bfloat16",
        "GRADIENT_ALLREDUCE_OP_MEAN": "mean",
        "GRADIENT_ALLREDUCE_OP_SUM": "sum",
        "CHECKPOINT_TAG_VALIDATION": "tag_validation",
        "CHECKPOINT_TAG_VALIDATION_DEFAULT": ValidationMode.WARN,
        "CHECKPOINT_TAG_VALIDATION_MODES": list(ValidationMode),
        "LOAD_UNIVERSAL_CHECKPOINT": "load_universal",
        "GRAD_ACCUM_DTYPE": "grad_accum_dtype",
        "ValidationMode": ValidationMode,
        "PIPE_REPLICATED": "ds_pipe_replicated",
        "DATA_PARALLEL_GROUP": "data_parallel_group",
        "GLOBAL_RANK": "global_rank",
        **{f"ROUTE_{name.upper()}": name for name in ("train", "eval", "predict", "encode")},
    }
    for section in _INSIDE:
        start = "BFLOAT16" if section == "bf16" else section.upper()
        group = KNOWN.settings[section]
        assert isinstance(group, SettingGroup), "a section"
        found.update(_of(group.settings, f"{start}_"))
    return found


def _of(settings: Mapping[str, Setting | SettingGroup], start: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, setting in settings.items():
        name = start + key.upper().removeprefix(start)
        found[name] = key
        if isinstance(setting, Setting):
            found[f"{name}_DEFAULT"] = setting.default
    return found
