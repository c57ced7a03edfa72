"""Every public name of DeepSpeed is here, or refused with a sentence, or listed as absent; so is every config key."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.bed.world import ROOT
from torsh_distributed.migrate.deepspeed import deepspeed_modules
from torsh_distributed.migrate.deepspeed.config.known_keys import KNOWN
from torsh_distributed.migrate.deepspeed.config.setting import Setting, SettingGroup
from torsh_distributed.migrate.deepspeed.surface.device_accelerator import get_accelerator
from torsh_distributed.migrate.deepspeed.surface.refused_names import REFUSED_MODULES, RefusedName
from torsh_distributed.migrate.deepspeed.training.deepspeed_engine import DeepSpeedEngine

NAMES = Path(__file__).with_name("deepspeed_names.txt")
PAGE = ROOT / "docs" / "reference" / "deepspeed.md"
ABSENT = {
    "deepspeed.accelerator": {"set_accelerator"},
    "deepspeed.checkpointing": {"CheckpointFunction"},
    "deepspeed.elasticity": {"elasticity_enabled", "ensure_immutable_elastic_config"},
    "deepspeed.moe.utils": {"is_moe_param_group", "configure_moe_param_groups"},
    "deepspeed.monitor.config": {"CometConfig", "get_monitor_config"},
    "deepspeed.monitor.monitor": {"Monitor"},
    "deepspeed.runtime.config_utils": {
        *("DeepSpeedConfigObject", "get_scalar_param", "get_dict_param", "get_list_param"),
        "dict_raise_error_on_duplicate_keys",
    },
    "deepspeed.runtime.lr_schedules": {"parse_arguments"},
    "deepspeed.runtime.pipe.schedule": {"TrainSchedule", "InferenceSchedule", "PipeSchedule"},
    "deepspeed.runtime.utils": {"get_grad_norm", "get_weight_norm"},
    "deepspeed.runtime.zero.mics": {"MiCS_Optimizer"},
    "deepspeed.utils": {"get_caller_func", "recursive_getattr", "recursive_setattr"},
    "deepspeed.utils.groups": {"initialize"},
    "deepspeed.utils.timer": {"NoopTimer"},
    "engine": {"set_custom_curriculum_learning_schedule", "set_data_post_process_func"},
}
"""Names that an import does not find. A change that loses another one fails here."""


def listed() -> dict[str, list[str]]:
    lines = [line for line in NAMES.read_text().splitlines() if not line.startswith("#")]
    return {module: names.split() for module, _, names in (line.partition(": ") for line in lines)}


def verdict_of(module: str, name: str, namespaces: Mapping[str, Mapping[str, Any]]) -> str:
    if module == "engine":
        return "present" if hasattr(DeepSpeedEngine, name) else "absent"
    if module == "accelerator":
        return "present" if hasattr(get_accelerator(), name) else "absent"
    if any(module == start or module.startswith(f"{start}.") for start in REFUSED_MODULES):
        return "refused"
    found = namespaces.get(module, {}).get(name)
    if isinstance(found, RefusedName):
        return "refused"
    return "present" if found is not None or f"{module}.{name}" in namespaces else "absent"


def keys_of(group: SettingGroup, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every config key, and its verdict in the plan; one that other keys decide is honoured or refused by them."""
    for name, setting in group.settings.items():
        if isinstance(setting, Setting):
            verdict = "by value" if setting.verdict is None else str(setting.verdict)
            yield f"{prefix}{name}", verdict
        elif setting.settings:
            yield from keys_of(setting, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", "by value"


def page() -> str:
    """The reference page."""
    namespaces = deepspeed_modules.namespaces()
    lines = [
        "# DeepSpeed's names",
        "",
        f"What becomes of the public names of DeepSpeed {deepspeed_modules.VERSION}, and of older ones that scripts",
        "import, under `torsh run --as deepspeed`. A refused name can be imported, or its module raises; the message",
        "says what to use. The methods of an engine and of `get_accelerator()` come last.",
        "[The guide](../guides/from-deepspeed.md)",
        "says how they differ.",
        "",
    ]
    for module, names in listed().items():
        lines += [f"## {module}", "", "```text"]
        verdicts = {name: verdict_of(module, name, namespaces) for name in names}
        for verdict in ("present", "refused", "absent"):
            found = [name for name in names if verdicts[name] == verdict]
            if found:
                text = f"{verdict}: {' '.join(found)}"
                lines += textwrap.wrap(text, 120, subsequent_indent="    ", break_long_words=False)
        lines += ["```", ""]
    lines += ["## Config keys", "", "By value: other keys or the value decide.", "", "```text"]
    lines += [f"{verdict:<10} {key}" for key, verdict in keys_of(KNOWN)]
    return "\n".join([*lines, "```", ""])


def test_no_name_of_a_module_is_none() -> None:
    namespaces = deepspeed_modules.namespaces()
    empty = [
        f"{module}.{name}"
        for module, names in namespaces.items()
        for name, value in names.items()
        if value is None and not name.endswith("_DEFAULT")
    ]
    assert empty == []


@pytest.mark.parametrize("module", listed())
def test_every_public_name_is_present_or_refused_or_listed_as_absent(module: str) -> None:
    namespaces = deepspeed_modules.namespaces()
    absent = {name for name in listed()[module] if verdict_of(module, name, namespaces) == "absent"}
    assert absent == ABSENT.get(module, set())


def test_the_page_is_what_is_there() -> None:
    assert PAGE.read_text() == page(), f"python -m {__name__} > {PAGE.relative_to(ROOT)}"


if __name__ == "__main__":
    print(page(), end="")
