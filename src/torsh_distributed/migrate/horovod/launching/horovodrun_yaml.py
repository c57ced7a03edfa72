"""The file of `horovodrun --config-file`, as options; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torsh_distributed.errors import InvalidArgument, IoError

_SECTIONS: dict[str, dict[str, str]] = {
    "params": {
        "fusion-threshold-mb": "--fusion-threshold-mb",
        "cycle-time-ms": "--cycle-time-ms",
        "cache-capacity": "--cache-capacity",
        "hierarchical-allreduce": "--hierarchical-allreduce",
        "hierarchical-allgather": "--hierarchical-allgather",
        "torus-allreduce": "--torus-allreduce",
    },
    "autotune": {
        "enabled": "--autotune",
        "log-file": "--autotune-log-file",
        "warmup-samples": "--autotune-warmup-samples",
        "steps-per-sample": "--autotune-steps-per-sample",
        "bayes-opt-max-samples": "--autotune-bayes-opt-max-samples",
        "gaussian-process-noise": "--autotune-gaussian-process-noise",
    },
    "timeline": {"filename": "--timeline-filename", "mark-cycles": "--timeline-mark-cycles"},
    "stall-check": {
        "enabled": "--stall-check",
        "warning-time-seconds": "--stall-check-warning-time-seconds",
        "shutdown-time-seconds": "--stall-check-shutdown-time-seconds",
    },
    "library-options": {
        "mpi-threads-disable": "--mpi-threads-disable",
        "mpi-args": "--mpi-args",
        "num-nccl-streams": "--num-nccl-streams",
        "thread-affinity": "--thread-affinity",
        "gloo-timeout-seconds": "--gloo-timeout-seconds",
    },
    "logging": {"level": "--log-level", "hide-timestamp": "--log-hide-timestamp"},
}
"""Keys of Horovod's YAML file that stand in a section, and the option each means; others are called as the option."""


def config_flags(path: str, num_values: Mapping[str, int]) -> list[list[str]]:
    """The options in a Horovod YAML file, each with its values. An unknown key is an error.

    `num_values`: how many values each option of `horovodrun` takes.
    """
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text()) or {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise IoError("Horovod's config file cannot be read", path=path, reason=str(error)) from error
    if not isinstance(content, dict):
        raise InvalidArgument("Horovod's config file holds keys and values", path=path)
    found: list[list[str]] = []
    for key, value in content.items():
        section = str(key).replace("_", "-")
        if section in _SECTIONS and isinstance(value, dict):
            for inner, setting in value.items():
                name = _SECTIONS[section].get(str(inner).replace("_", "-"))
                found += _words(name, setting, f"{key}.{inner}", path, num_values)
        else:
            found += _words(f"--{section}", value, str(key), path, num_values)
    return found


def _words(name: str | None, value: Any, key: str, path: str, num_values: Mapping[str, int]) -> list[list[str]]:
    if name is None or name not in num_values:
        raise InvalidArgument(f"{key} is not a key of Horovod's config file", path=path, key=key)
    if value is None:
        return []
    if num_values[name] == 0:
        if value is False:
            negated = f"--no-{name.removeprefix('--')}"
            return [[negated]] if negated in num_values else []
        return [[name]]
    values = [str(one) for one in value] if isinstance(value, list) else [str(value)]
    if len(values) != num_values[name]:
        raise InvalidArgument(f"{key} takes {num_values[name]} value(s)", path=path, got=value)
    return [[name, *values]]
