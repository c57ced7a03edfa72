"""The sections of a config as the models that DeepSpeed has of them: `DeepSpeedZeroConfig(**section).stage`.

Made from the tables of keys, so a key and its default are written once. Imports no torch.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from torsh_distributed.migrate.deepspeed.config.deepspeed_config import WITHOUT_BEGINNING
from torsh_distributed.migrate.deepspeed.config.known_keys import KNOWN, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM, ZERO
from torsh_distributed.migrate.deepspeed.config.section_keys import (
    BF16,
    COMET,
    COMMS_LOGGER,
    FLOPS,
    FP16,
    TENSORBOARD,
    WANDB,
)
from torsh_distributed.migrate.deepspeed.config.setting import Setting, SettingGroup


class ZeroStageEnum(IntEnum):
    """The stages of ZeRO by what is sharded."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(StrEnum):
    """Where offloaded state lives."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(StrEnum):
    """What `engine.offload_states` can be told to move."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class DeepSpeedConfigModel(BaseModel):
    """A section: unknown keys raise, and a value of "auto" is the default."""

    model_config = ConfigDict(
        extra="forbid", validate_default=False, populate_by_name=True, use_enum_values=False, protected_namespaces=()
    )

    def __init__(self, strict: bool = False, **data: Any) -> None:
        super().__init__(**{key: value for key, value in data.items() if value != "auto"})


_TYPES: dict[str, Any] = {
    "flag": bool | None,
    "whole": int | None,
    "number": float | None,
    "text": str | None,
    "words": list[str] | None,
    "any": Any,
}


def _fields(group: SettingGroup, **kinds: Any) -> dict[str, Any]:
    """A field for each key; `kinds` are the types of those that are not plain values."""
    found: dict[str, Any] = {}
    for key, setting in group.settings.items():
        name = key.removeprefix("stage3_")
        alias = key if name in WITHOUT_BEGINNING else None
        default = setting.default if isinstance(setting, Setting) else None
        kind = kinds.get(key, _TYPES[setting.kind] if isinstance(setting, Setting) else Any)
        least = setting.least if isinstance(setting, Setting) and key not in kinds else None
        found[name if alias else key] = (kind, Field(default, alias=alias, ge=least))
    return found


def _model(name: str, group: SettingGroup, **kinds: Any) -> type[DeepSpeedConfigModel]:
    """A model with the keys of a section and DeepSpeed's defaults."""
    return create_model(name, __base__=DeepSpeedConfigModel, **_fields(group, **kinds))


DeepSpeedZeroOffloadParamConfig = _model("DeepSpeedZeroOffloadParamConfig", OFFLOAD_PARAM, device=OffloadDeviceEnum)
DeepSpeedZeroOffloadOptimizerConfig = _model(
    "DeepSpeedZeroOffloadOptimizerConfig", OFFLOAD_OPTIMIZER, device=OffloadDeviceEnum
)


class _ZeroRules(DeepSpeedConfigModel):
    """What DeepSpeed makes of old keys of zero_optimization, and the default that depends on the stage."""

    @model_validator(mode="before")
    @classmethod
    def _take_old_keys(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        taken = dict(values)
        for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
            if taken.get(old):
                taken.setdefault(new, {"device": "cpu"})
        if taken.get("stage3_gather_fp16_weights_on_model_save"):
            taken.setdefault("stage3_gather_16bit_weights_on_model_save", True)
        if taken.get("overlap_comm") is None:
            taken["overlap_comm"] = taken.get("stage", 0) == ZeroStageEnum.weights
        return taken


DeepSpeedZeroConfig = create_model(
    "DeepSpeedZeroConfig",
    __base__=_ZeroRules,
    **_fields(
        ZERO,
        stage=ZeroStageEnum,
        offload_param=DeepSpeedZeroOffloadParamConfig | None,
        offload_optimizer=DeepSpeedZeroOffloadOptimizerConfig | None,
    ),
)
DeepSpeedFP16Config = _model("DeepSpeedFP16Config", FP16)
DeepSpeedBF16Config = _model("DeepSpeedBF16Config", BF16)
TensorBoardConfig = _model("TensorBoardConfig", TENSORBOARD)
CSVConfig = _model("CSVConfig", TENSORBOARD)
WandbConfig = _model("WandbConfig", WANDB)
CometConfig = _model("CometConfig", COMET)
DeepSpeedCommsConfig = _model("DeepSpeedCommsConfig", COMMS_LOGGER)
DeepSpeedFlopsProfilerConfig = _model("DeepSpeedFlopsProfilerConfig", FLOPS)
_ACTIVATIONS = KNOWN.settings["activation_checkpointing"]
assert isinstance(_ACTIVATIONS, SettingGroup), "a section"
DeepSpeedActivationCheckpointingConfig = _model("DeepSpeedActivationCheckpointingConfig", _ACTIVATIONS)


class DeepSpeedMonitorConfig(DeepSpeedConfigModel):
    """The sections of the monitors."""

    tensorboard: Any = None
    wandb: Any = None
    csv_monitor: Any = None
    comet: Any = None
