"""DeepSpeed's configs for `torsh migrate FILE`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torsh_distributed.migrate.deepspeed.config.deepspeed_config import from_deepspeed
from torsh_distributed.migrate.deepspeed.config.known_keys import KNOWN
from torsh_distributed.migrate.report import MigrationReport
from torsh_distributed.plan import Plan

_TOLD_BY = {"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization", "gradient_accumulation_steps"}


def looks_like(document: Mapping[str, Any]) -> bool:
    """Whether a parsed file is a DeepSpeed config, by the names at its top."""
    return bool(_TOLD_BY & document.keys()) and sum(name in KNOWN.settings for name in document) * 2 > len(document)


def translate(path: Path, **options: Any) -> tuple[Plan, MigrationReport]:
    """The plan of the file, and the report on it."""
    return from_deepspeed(path, **options)
