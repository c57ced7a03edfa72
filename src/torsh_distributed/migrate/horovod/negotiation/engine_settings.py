"""What HOROVOD_* variables say about the engine, read once, at `init`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torsh_distributed import known_variables


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """How operations are packed, remembered and watched."""

    fusion_threshold_bytes: int
    """All-reduces that are ready together share a buffer up to this size."""

    cycle_s: float
    """How long small operations wait for others at most, unless somebody waits for them; 0 passes on each at once."""

    cache_capacity: int
    """Repeated operations that travel as a number; 0 sends every request in full."""

    stall_warning_s: float | None
    """After how long an operation that some ranks have not asked for is reported; None never."""

    stall_shutdown_s: float | None
    """After how long such an operation fails on all ranks; None never."""

    timeout_s: float
    """Time for the ranks of a set to connect."""


def read_settings(environ: Mapping[str, str], *, timeout_s: float) -> EngineSettings:
    """The settings of HOROVOD_FUSION_THRESHOLD and its like; raises ConfigurationError with the variable's name."""
    is_watched = not known_variables.is_on("HOROVOD_STALL_CHECK_DISABLE", environ)
    warning_s = known_variables.number("HOROVOD_STALL_CHECK_TIME_SECONDS", environ)
    shutdown_s = known_variables.number("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", environ)
    if shutdown_s and is_watched and shutdown_s < warning_s:
        warning_s = shutdown_s
    return EngineSettings(
        fusion_threshold_bytes=int(known_variables.number("HOROVOD_FUSION_THRESHOLD", environ)),
        cycle_s=known_variables.number("HOROVOD_CYCLE_TIME", environ) / 1000,
        cache_capacity=int(known_variables.number("HOROVOD_CACHE_CAPACITY", environ)),
        stall_warning_s=warning_s if is_watched and warning_s else None,
        stall_shutdown_s=shutdown_s if is_watched and shutdown_s else None,
        timeout_s=timeout_s,
    )
