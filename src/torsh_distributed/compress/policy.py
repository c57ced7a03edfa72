"""Which gradients are compressed at which steps: pure functions, the same on every rank."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from fnmatch import fnmatchcase

from torsh_distributed.plan import CompressConfig


def is_warm_up(config: CompressConfig, step: int) -> bool:
    """Whether this step is one of the first, which travel uncompressed."""
    return step < config.warmup_steps


def is_dense_step(config: CompressConfig, step: int) -> bool:
    """Whether this step sends everything uncompressed: during warm-up, and between compressed steps."""
    if config.name == "none" or is_warm_up(config, step):
        return True
    return (step - config.warmup_steps) % config.period != 0


def travels_dense(config: CompressConfig, name: str, numel: int) -> bool:
    """Whether this tensor is never compressed: it is small, or a pattern of `skip_names` matches its name."""
    return numel < config.skip_below_numel or any(fnmatchcase(name, pattern) for pattern in config.skip_names)


def stream_of(names: Iterable[str]) -> int:
    """A number for tensors that travel as one, equal on all ranks and in every run (unlike `hash`)."""
    return zlib.crc32("\n".join(names).encode())
