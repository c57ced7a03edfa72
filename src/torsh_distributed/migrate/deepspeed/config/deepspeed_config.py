"""A DeepSpeed config: read from a file or a dict, checked key by key, and made into a plan with a verdict on every key.

DeepSpeed's top level takes any key, and half of its sections do, so a typo there trains with the default. Such a key is
named here with the nearest one, in a warning; with `strict` it is an error. Imports no torch.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.migrate.deepspeed.config.hjson_format import ConfigSource, read_config
from torsh_distributed.migrate.deepspeed.config.known_keys import KNOWN, fill
from torsh_distributed.migrate.deepspeed.config.setting import problems_in, put_plain_values, unknown_keys
from torsh_distributed.migrate.deepspeed.config.translation import Translation
from torsh_distributed.migrate.deepspeed.config.translators.batch_keys import (
    BatchTriangle,
    resolve_batch,
    translate_batch,
)
from torsh_distributed.migrate.deepspeed.config.translators.mesh_keys import translate_mesh
from torsh_distributed.migrate.deepspeed.config.translators.number_formats import translate_precision, translate_run
from torsh_distributed.migrate.deepspeed.config.translators.optimizer_keys import translate_optimizer
from torsh_distributed.migrate.report import MigrationReport
from torsh_distributed.plan import Plan
from torsh_distributed.plan.problems import Problem, configuration_error

_log = logging.getLogger(__name__)

WITHOUT_BEGINNING = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "gather_16bit_weights_on_model_save",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
)
"""Keys `stage3_…` of zero_optimization that DeepSpeed also takes under these names."""

NEWEST = (0, 19, 8)
"""The version whose defaults hold unless another is named: what a config leaves out has changed over time."""


class DeepSpeedConfig:
    """The values of a config, without "auto". `to_plan` makes a plan of it.

    `fills`: values for keys that are "auto", by key in full, as a trainer would fill them. `version`: the DeepSpeed
    that the config was used with, for the defaults that changed. `strict`: a key that DeepSpeed ignores, because it has
    none of that name, is an error; without it, a warning. Raises ConfigurationError with every key that DeepSpeed
    refuses, wrong value and "auto" without a fill.
    """

    def __init__(
        self,
        source: ConfigSource,
        *,
        fills: Mapping[str, Any] | None = None,
        version: str | None = None,
        strict: bool = False,
    ) -> None:
        self.values, self._name = read_config(source)
        self.version = NEWEST if version is None else _version(version)
        self._prepare()
        problems = fill(self.values, fills or {})
        problems += unknown_keys(self.values, KNOWN, is_checked=True)
        stray = list(unknown_keys(self.values, KNOWN, is_checked=False))
        if strict:
            problems += stray
        else:
            _warn_of(stray)
        reported = {problem.key for problem in problems}
        problems += [
            one for one in problems_in(self.values, KNOWN) if one.key not in reported and not self._is_auto(one.key)
        ]
        if problems:
            raise configuration_error(problems, where=self._name)

    def _prepare(self) -> None:
        """Bring what was read into the newest spelling, before it is checked."""
        _modernise(self.values)
        put_plain_values(self.values, KNOWN)

    @classmethod
    def from_file(cls, path: str, **options: Any) -> DeepSpeedConfig:
        """The config in a JSON or HJSON file."""
        return cls(path, **options)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], **options: Any) -> DeepSpeedConfig:
        """The config in a dict, which is copied."""
        return cls(values, **options)

    def get(self, key: str) -> Any:
        """The value under a key in full (`zero_optimization.stage`): as given, or DeepSpeed's default."""
        return self._translation(None).get(key)

    def batch(self, data_ranks: int) -> BatchTriangle:
        """The three batch sizes for a number of data parallel ranks."""
        train, micro, passes = (
            self.get(key)
            for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        )
        found = resolve_batch(train, micro, passes, data_ranks)
        assert found is not None, "the number of ranks is given"
        return found

    def to_plan(self, world_size: int | None = None) -> tuple[Plan, MigrationReport]:
        """The plan, and a verdict on every key. The plan does without what is refused.

        `world_size`: the ranks that it is for; None takes those of the running job, or leaves the number open, which
        works if train_batch_size is given. Raises ConfigurationError for keys that contradict each other.
        """
        one = self._translation(_running_world() if world_size is None else world_size)
        for translate in (translate_mesh, translate_precision, translate_batch, translate_optimizer, translate_run):
            translate(one)
        if one.problems:
            raise configuration_error(one.problems, where=self._name)
        plan = Plan.from_dict(one.sections)
        plan.validate(one.world_size)
        return plan, MigrationReport("deepspeed", one.entries())

    def _translation(self, world_size: int | None) -> Translation:
        return Translation(self.values, world_size=world_size, version=self.version)

    def _is_auto(self, key: str) -> bool:
        found: Any = self.values
        for name in key.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        return bool(found == "auto")


def from_deepspeed(
    source: ConfigSource,
    *,
    world_size: int | None = None,
    fills: Mapping[str, Any] | None = None,
    version: str | None = None,
    strict: bool = False,
) -> tuple[Plan, MigrationReport]:
    """A DeepSpeed config as a plan, with a verdict on every key: `DeepSpeedConfig(...).to_plan(...)`."""
    return DeepSpeedConfig(source, fills=fills, version=version, strict=strict).to_plan(world_size)


def _warn_of(stray: Sequence[Problem]) -> None:
    for one in stray:
        near = f": {one.hint}" if one.hint.startswith("did you mean") else ""
        _log.warning("%s, and DeepSpeed ignores it%s", one.text, near)


def _modernise(values: dict[str, Any]) -> None:
    """Other spellings: `zero_optimization: true` is stage 1, and its keys for stage 3 may lack their beginning."""
    zero = values.get("zero_optimization")
    if isinstance(zero, bool):
        values["zero_optimization"] = {"stage": int(zero)}
        return
    if not isinstance(zero, dict):
        return
    if isinstance(zero.get("stage"), bool):
        zero["stage"] = int(zero["stage"])
    for name in WITHOUT_BEGINNING:
        if name in zero:
            zero.setdefault(f"stage3_{name}", zero.pop(name))


def _version(text: str) -> tuple[int, ...]:
    numbers = text.split("+")[0].split(".")[:3]
    if not all(part.isdigit() for part in numbers):
        raise ConfigurationError(f"{text!r} is not a version of DeepSpeed", hint="such as 0.16.4")
    return tuple(int(part) for part in numbers)


def _running_world() -> int | None:
    """The size of the world that this process is in, if torch is there and has one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return int(torch.distributed.get_world_size())


_TOLD_BY = {"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization", "gradient_accumulation_steps"}


def looks_like(document: Mapping[str, Any]) -> bool:
    """Whether a parsed file is a DeepSpeed config, by the names at its top."""
    return bool(_TOLD_BY & document.keys()) and sum(name in KNOWN.settings for name in document) * 2 > len(document)


def translate(path: Path, **options: Any) -> tuple[Plan, MigrationReport]:
    """The plan of the file, and the report on it."""
    return from_deepspeed(path, **options)
