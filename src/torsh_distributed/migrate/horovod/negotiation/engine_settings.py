"""What HOROVOD_* variables say about the engine, read once, at `init`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torsh_distributed.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """How operations are packed, remembered and watched."""

    fusion_threshold_bytes: int = 128 * 2**20
    """All-reduces that are ready together share a buffer up to this size."""

    cycle_s: float = 1e-3
    """How long small operations wait for others at most, unless somebody waits for them; 0 passes on each at once."""

    cache_capacity: int = 1024
    """Repeated operations that travel as a number; 0 sends every request in full."""

    stall_warning_s: float | None = 60.0
    """After how long an operation that some ranks have not asked for is reported; None never."""

    stall_shutdown_s: float | None = 3600.0
    """After how long such an operation fails on all ranks; None never."""

    timeout_s: float = 300.0
    """Time for the ranks of a set to connect."""


def read_settings(environ: Mapping[str, str], *, timeout_s: float) -> EngineSettings:
    """The settings of HOROVOD_FUSION_THRESHOLD and its like; raises ConfigurationError with the variable's name."""
    is_watched = not _flag(environ, "HOROVOD_STALL_CHECK_DISABLE")
    warning_s = _number(environ, "HOROVOD_STALL_CHECK_TIME_SECONDS", 60.0)
    shutdown_s = _number(environ, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 3600.0)
    if shutdown_s and is_watched and shutdown_s < warning_s:
        warning_s = shutdown_s
    return EngineSettings(
        fusion_threshold_bytes=int(_number(environ, "HOROVOD_FUSION_THRESHOLD", 128 * 2**20)),
        cycle_s=_number(environ, "HOROVOD_CYCLE_TIME", 1.0) / 1000,
        cache_capacity=int(_number(environ, "HOROVOD_CACHE_CAPACITY", 1024)),
        stall_warning_s=warning_s if is_watched and warning_s else None,
        stall_shutdown_s=shutdown_s if is_watched and shutdown_s else None,
        timeout_s=timeout_s,
    )


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name)
    if text is None or text == "":
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigurationError(f"{name} must be a number, 0 or above", hint=f"unset {name}", variable=name, got=text)
    return value


def _flag(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "0").lower() not in ("", "0", "false")


def is_set(environ: Mapping[str, str], name: str) -> bool:
    """Whether a switch such as HOROVOD_DYNAMIC_PROCESS_SETS is on."""
    return _flag(environ, name)
