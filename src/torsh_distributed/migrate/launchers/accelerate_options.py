"""Options of `accelerate launch`: its YAML with changes from the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.migrate.launchers.accelerate_config import KEYS
from torsh_distributed.migrate.launchers.accelerate_keys import (
    DEEPSPEED_KEYS,
    DYNAMO_KEYS,
    FP8_KEYS,
    FSDP_KEYS,
    MEGATRON_KEYS,
    PARALLELISM_KEYS,
)
from torsh_distributed.migrate.plan_draft import read_document
from torsh_distributed.plan.problems import did_you_mean

_SWITCHES = {
    "cpu": ("use_cpu", True),
    "multi_gpu": ("distributed_type", "MULTI_GPU"),
    "tpu": ("distributed_type", "XLA"),
    "use_fsdp": ("distributed_type", "FSDP"),
    "use_deepspeed": ("distributed_type", "DEEPSPEED"),
    "use_megatron_lm": ("distributed_type", "MEGATRON_LM"),
    "same_network": ("same_network", True),
    "debug": ("debug", True),
    "enable_cpu_affinity": ("enable_cpu_affinity", True),
    "tpu_use_sudo": ("tpu_use_sudo", True),
    "dynamo_use_fullgraph": ("dynamo_config.dynamo_use_fullgraph", True),
    "dynamo_use_dynamic": ("dynamo_config.dynamo_use_dynamic", True),
    "dynamo_use_regional_compilation": ("dynamo_config.dynamo_use_regional_compilation", True),
}
"""Options without a value, and the key of the file that each sets."""
_NO_KEY = ("use_parallelism_config", "no_tpu_cluster", "tpu_cluster", "quiet", "q")
_OF_TORSH = {"max_restarts": "--max-restarts", "log_dir": "--log-dir", "role": "--role"}
_NO_EFFECT = ("monitor_interval", "rdzv_conf", "tee", "t", "num_cpu_threads_per_process", "mpirun_hostfile")


def read_accelerate(words: Sequence[str]) -> tuple[dict[str, Any], list[str], dict[str, str], list[str]]:
    """The settings, options of `torsh run`, variables of the workers, and the program of a line.

    What the command line says wins over the file of `--config_file`.
    """
    rest, given, options, env = list(words), {}, [], {}
    values: dict[str, Any] = {}
    while rest and rest[0].startswith("-") and rest[0] != "--":
        word = rest.pop(0)
        name, has_value, text = word.lstrip("-").replace("-", "_").partition("=") if "=" not in word else _split(word)
        if name in ("m", "module", "no_python"):
            options.append("--module" if name != "no_python" else "--no-python")
        elif name in _SWITCHES:
            key, value = _SWITCHES[name]
            given[key] = value
        elif name in _NO_KEY:
            continue
        else:
            value_text = text if has_value else (rest.pop(0) if rest else "")
            if name == "config_file":
                values = read_document(Path(value_text))
            elif name in _OF_TORSH:
                options += [_OF_TORSH[name], value_text]
            elif name in _NO_EFFECT:
                if name == "num_cpu_threads_per_process":
                    env["OMP_NUM_THREADS"] = value_text
            else:
                given[_key_of(name)] = _value(value_text)
    return _merged(values, given), options, env, (rest[1:] if rest[:1] == ["--"] else rest)


def _split(word: str) -> tuple[str, str, str]:
    name, equals, text = word.partition("=")
    return name.lstrip("-").replace("-", "_"), equals, text


def _key_of(name: str) -> str:
    """The key of the file that an option with a value sets; sections are written with a dot."""
    sections: dict[str, Mapping[str, Any]] = {
        "fsdp_config": FSDP_KEYS,
        "deepspeed_config": DEEPSPEED_KEYS,
        "megatron_lm_config": MEGATRON_KEYS,
        "parallelism_config": PARALLELISM_KEYS,
        "dynamo_config": DYNAMO_KEYS,
    }
    if name in KEYS:
        return name
    for section, keys in sections.items():
        if name in keys:
            return f"{section}.{name}"
    fp8 = name.removeprefix("fp8_")
    if fp8 in FP8_KEYS or name in FP8_KEYS:
        return f"fp8_config.{name if name in FP8_KEYS else fp8}"
    known = [*KEYS, *_SWITCHES, *(key for keys in sections.values() for key in keys)]
    raise InvalidArgument(
        f"accelerate launch has no option --{name}", hint=did_you_mean(name, known) or "see its --help"
    )


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    return int(text) if text.isdigit() else text


def _merged(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    made = {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
    for key, value in given.items():
        section, _, name = key.rpartition(".")
        if section:
            table = made.get(section)
            made[section] = {**(table if isinstance(table, dict) else {}), name: value}
        else:
            made[name] = value
    return made
