"""DeepSpeed's config sections as pydantic models: `DeepSpeedZeroConfig(stage=3).reduce_bucket_size`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, create_model

from torsh_distributed.migrate.deepspeed.config.known_keys import ZERO
from torsh_distributed.migrate.deepspeed.config.section_keys import BF16, FP16
from torsh_distributed.migrate.deepspeed.config.setting import Setting, SettingGroup


class DeepSpeedConfigModel(BaseModel):
    """A section: unknown keys raise, and a value of "auto" is the default."""

    model_config = ConfigDict(extra="forbid", validate_default=False, protected_namespaces=())

    def __init__(self, strict: bool = False, **data: Any) -> None:
        super().__init__(**{key: value for key, value in data.items() if value != "auto"})


def _model(name: str, section: SettingGroup) -> type[DeepSpeedConfigModel]:
    """A model with the keys of a section and DeepSpeed's defaults."""
    fields: dict[str, Any] = {
        key: (Any, setting.default if isinstance(setting, Setting) else None)
        for key, setting in section.settings.items()
    }
    return create_model(name, __base__=DeepSpeedConfigModel, **fields)


DeepSpeedZeroConfig = _model("DeepSpeedZeroConfig", ZERO)
DeepSpeedFP16Config = _model("DeepSpeedFP16Config", FP16)
DeepSpeedBF16Config = _model("DeepSpeedBF16Config", BF16)
