"""`deepspeed.runtime.config_utils`: for libraries that read their own sections of a config. Imports no torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from typing_extensions import override

from torsh_distributed.migrate.deepspeed.config.section_models import DeepSpeedMonitorConfig


class DeepSpeedConfigObject:
    """A section that prints itself as JSON."""

    def repr(self) -> dict[str, Any]:
        """The values by name."""
        return self.__dict__

    @override
    def __repr__(self) -> str:
        return json.dumps(self.__dict__, sort_keys=True, indent=4)


def get_scalar_param(param_dict: Mapping[str, Any], param_name: str, param_default_value: Any) -> Any:
    """A value of a section, or the default."""
    return param_dict.get(param_name, param_default_value)


get_list_param = get_dict_param = get_scalar_param


def dict_raise_error_on_duplicate_keys(ordered_pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.load(object_pairs_hook=…)`: a dict; ValueError if a key is there twice."""
    pairs = list(ordered_pairs)
    twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"Duplicate keys in DeepSpeed config: {twice}")
    return dict(pairs)


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    """The monitors' sections of a config."""
    names = ("tensorboard", "wandb", "csv_monitor", "comet")
    return DeepSpeedMonitorConfig(**{name: param_dict.get(name, {}) for name in names})
