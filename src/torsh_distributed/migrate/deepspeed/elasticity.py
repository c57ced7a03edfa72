"""DeepSpeed's elastic batch: one train_batch_size that many numbers of GPUs divide evenly. Pure arithmetic.

Version 0.1 counts GPUs, 0.2 counts nodes and knows model parallelism. DeepSpeed removed elasticity in 0.19; files and
schedulers that use it are still about.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.migrate.report import unknown_key
from torsh_distributed.plan.problems import configuration_error

SCHEDULER_VARIABLE = "DEEPSPEED_ELASTICITY_CONFIG"
"""Set by an elastic scheduler to the section it planned with; the run's must be the same."""

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_MOST_PARTS = 720_720
"""The largest highly composite number that DeepSpeed multiplies with."""
_OLDEST_DEEPSPEED = (0, 3, 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticBatch:
    """The batch, the data parallel sizes that divide it, and a micro-batch for one of them."""

    train_batch_size: int
    world_sizes: tuple[int, ...]
    micro_batch_size: int | None = None
    """For the world size that was asked about; None if none was."""


@dataclass(frozen=True, kw_only=True)
class ElasticSettings:
    """The `elasticity` section of a DeepSpeed file."""

    enabled: bool = False
    max_train_batch_size: int = 2000
    micro_batch_sizes: tuple[int, ...] = (2, 4, 6)
    min_gpus: int = 1
    max_gpus: int = 10000
    min_time: int = 0
    prefer_larger_batch: bool = True
    ignore_non_elastic_batch_info: bool = False
    version: float = 0.2
    model_parallel_size: int = 1
    num_gpus_per_node: int = 1

    @classmethod
    def from_section(cls, section: Mapping[str, Any]) -> ElasticSettings:
        """The section, checked. Raises ConfigurationError with the key that is wrong, unknown or missing."""
        given = dict(section)
        if "prefer_larger_batch_size" in given:  # what older files call it
            given["prefer_larger_batch"] = given.pop("prefer_larger_batch_size")
        known = cls.__dataclass_fields__
        unknown = [unknown_key(f"elasticity.{name}", known, kind="DeepSpeed") for name in given if name not in known]
        if unknown:
            raise configuration_error(unknown, where="elasticity")
        if given.get("enabled", False):
            for name in ("max_train_batch_size", "micro_batch_sizes"):
                if name not in given:
                    raise ConfigurationError(f"elasticity needs {name}", hint=f"add {name} to the elasticity section")
        given["micro_batch_sizes"] = _micro_batches(given.get("micro_batch_sizes", cls.micro_batch_sizes))
        settings = cls(**{**given, "version": float(given.get("version", 0.2))})
        settings.check()
        return settings

    def check(self) -> None:
        """Raise ConfigurationError for values that contradict each other."""
        if self.version not in (0.1, 0.2):
            raise ConfigurationError(
                f"elasticity.version {self.version:g} is unknown", hint="0.1 counts GPUs, 0.2 nodes"
            )
        if not 1 <= self.min_gpus <= self.max_gpus:
            raise ConfigurationError(
                "elasticity.min_gpus must be at least 1 and at most elasticity.max_gpus",
                min_gpus=self.min_gpus,
                max_gpus=self.max_gpus,
            )
        if self.model_parallel_size > 1 and self.version != 0.2:
            raise ConfigurationError(
                "elasticity.model_parallel_size needs elasticity.version 0.2", hint="set version to 0.2"
            )
        if self.num_gpus_per_node % self.model_parallel_size:
            raise ConfigurationError(
                f"elasticity.num_gpus_per_node {self.num_gpus_per_node} is not a multiple of"
                f" elasticity.model_parallel_size {self.model_parallel_size}",
                hint="a model is split within a node",
            )
        too_large = [size for size in self.micro_batch_sizes if size > self.max_train_batch_size]
        if too_large:
            raise ConfigurationError(
                f"elasticity.micro_batch_sizes {too_large} are above max_train_batch_size {self.max_train_batch_size}",
                hint="a micro-batch is part of a batch",
            )


def compute_elastic_config(
    ds_config: Mapping[str, Any],
    target_deepspeed_version: str = "0.18",
    world_size: int = 0,
    return_microbatch: bool = False,
) -> tuple[int, list[int]] | tuple[int, list[int], int | None]:
    """DeepSpeed's function of this name: batch and valid GPU counts; with a world size also its micro-batch."""
    numbers = [int(part) for part in target_deepspeed_version.split("+")[0].split(".")[:3] if part.isdigit()]
    if tuple(numbers) < _OLDEST_DEEPSPEED:
        raise ConfigurationError(f"elasticity needs DeepSpeed 0.3.8 or later, not {target_deepspeed_version}")
    section = ds_config.get("elasticity", {})
    if not section.get("enabled", False):
        raise ConfigurationError(
            "elasticity is not enabled in the config", hint='set "elasticity": {"enabled": true, …}'
        )
    found = elastic_batch(ElasticSettings.from_section(section), world_size)
    sizes = list(found.world_sizes)
    if world_size > 0:
        return found.train_batch_size, sizes, found.micro_batch_size
    if return_microbatch:
        return (
            found.train_batch_size,
            sizes,
            elastic_batch(ElasticSettings.from_section(section), max(sizes)).micro_batch_size,
        )
    return found.train_batch_size, sizes


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Whether a config asks for elastic batches."""
    return bool(ds_config.get("elasticity", {}).get("enabled", False))


def ensure_immutable_elastic_config(runtime_elastic_config_dict: Mapping[str, Any]) -> None:
    """Raise ConfigurationError if an elastic scheduler planned with another section than this."""
    require_scheduled(runtime_elastic_config_dict, os.environ)


def elastic_batch(settings: ElasticSettings, num_gpus: int = 0) -> ElasticBatch:
    """The batch for these settings; with `num_gpus`, for a world of that size, whose micro-batch is given too.

    Raises ConfigurationError if that world does not divide the batch: the message has the sizes that do.
    """
    if settings.version == 0.1:
        batch, sizes = _best_batch(
            settings.micro_batch_sizes,
            settings.max_train_batch_size,
            (settings.min_gpus, settings.max_gpus),
            settings.prefer_larger_batch,
        )
    else:
        batch, sizes = _batch_of_nodes(settings, num_gpus)
    if not num_gpus:
        return ElasticBatch(train_batch_size=batch, world_sizes=sizes)
    degree = num_gpus // settings.model_parallel_size
    if degree not in sizes:
        raise ConfigurationError(
            f"a world of {num_gpus} GPUs does not divide the elastic batch of {batch}",
            hint=f"start one of {', '.join(map(str, sizes))} data parallel ranks",
            world_size=num_gpus,
        )
    fitting = [size for size in settings.micro_batch_sizes if (batch // degree) % size == 0]
    if not fitting:
        raise ConfigurationError(
            f"none of elasticity.micro_batch_sizes divides the {batch // degree} samples of a rank",
            hint="add 1, or another divisor, to micro_batch_sizes",
        )
    return ElasticBatch(train_batch_size=batch, world_sizes=sizes, micro_batch_size=max(fitting))


def require_scheduled(section: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Raise ConfigurationError if an elastic scheduler planned with another section than the run's."""
    text = environ.get(SCHEDULER_VARIABLE)
    if text is None:
        return
    planned, ours = ElasticSettings.from_section(json.loads(text)), ElasticSettings.from_section(section)
    for name in ("max_train_batch_size", "micro_batch_sizes", "version"):
        theirs, mine = getattr(planned, name), getattr(ours, name)
        if theirs != mine:
            raise ConfigurationError(
                f"elasticity.{name} is {mine} here, but the scheduler planned with {theirs}",
                hint=f"use the section in {SCHEDULER_VARIABLE}, or have the job scheduled again",
            )


def _batch_of_nodes(settings: ElasticSettings, num_gpus: int) -> tuple[int, tuple[int, ...]]:
    """Version 0.2: the same arithmetic on nodes, and a batch for this very world if that does not fit."""
    per_node = settings.num_gpus_per_node // settings.model_parallel_size
    nodes = (settings.min_gpus // settings.num_gpus_per_node, settings.max_gpus // settings.num_gpus_per_node)
    batch, counts = _best_batch(
        settings.micro_batch_sizes,
        settings.max_train_batch_size // per_node,
        (nodes[0] or 1, nodes[1] or settings.max_train_batch_size // min(settings.micro_batch_sizes)),
        settings.prefer_larger_batch,
    )
    batch, sizes = batch * per_node, tuple(count * per_node for count in counts)
    if not num_gpus or num_gpus // settings.model_parallel_size in sizes:
        return batch, sizes
    degree = num_gpus * per_node // settings.num_gpus_per_node
    whole = [settings.max_train_batch_size // (size * degree) * size * degree for size in settings.micro_batch_sizes]
    possible = [size for size in whole if size]
    if not possible:
        raise ConfigurationError(
            f"a world of {num_gpus} GPUs has more samples in one micro-batch each than elasticity.max_train_batch_size"
            f" {settings.max_train_batch_size}",
            hint="raise max_train_batch_size, or start fewer GPUs",
        )
    return (max(possible) if settings.prefer_larger_batch else min(possible)), (degree,)


def _best_batch(
    micro_batches: Sequence[int], most: int, gpus: tuple[int, int], prefer_larger: bool
) -> tuple[int, tuple[int, ...]]:
    """The batch up to `most` that the most numbers of GPUs divide, and those numbers."""
    found: dict[int, tuple[int, ...]] = {}
    for base in {*micro_batches, math.lcm(*micro_batches)}:
        if base <= most:
            batch = base * _largest_highly_composite(most // base)
            found[batch] = _valid_sizes(batch, micro_batches, gpus)
    order = sorted(found, reverse=prefer_larger)
    best = max(order, key=lambda batch: len(found[batch]), default=0)
    if not found.get(best):
        raise ConfigurationError(
            "no batch suits any number of GPUs that elasticity allows",
            hint="raise max_train_batch_size or max_gpus, or lower min_gpus",
            micro_batch_sizes=list(micro_batches),
        )
    return best, found[best]


def _valid_sizes(batch: int, micro_batches: Sequence[int], gpus: tuple[int, int]) -> tuple[int, ...]:
    fewest, most = gpus
    quotients = [batch // size for size in micro_batches if batch % size == 0]
    return tuple(sorted({one for quotient in quotients for one in _divisors(quotient) if fewest <= one <= most}))


def _divisors(number: int) -> Iterator[int]:
    for low in range(1, math.isqrt(number) + 1):
        if number % low == 0:
            yield low
            yield number // low


def _largest_highly_composite(limit: int) -> int:
    """The largest number up to `limit` that has more divisors than every smaller one."""
    # Such numbers are products of the first primes whose exponents do not rise.
    candidates: list[tuple[int, int]] = []

    def extend(number: int, num_divisors: int, primes: tuple[int, ...], most: int) -> None:
        candidates.append((number, num_divisors))
        if not primes:
            return
        for exponent in range(1, most + 1):
            number *= primes[0]
            if number > min(limit, _MOST_PARTS):
                return
            extend(number, num_divisors * (exponent + 1), primes[1:], exponent)

    extend(1, 1, (2, 3, 5, 7, 11, 13, 17), 20)
    largest, most_divisors = 1, 0
    for number, num_divisors in sorted(candidates):
        if num_divisors > most_divisors:
            largest, most_divisors = number, num_divisors
    return largest


def _micro_batches(value: Any) -> tuple[int, ...]:
    is_good = isinstance(value, list | tuple) and bool(value) and all(type(one) is int and one > 0 for one in value)
    if not is_good:
        raise ConfigurationError(
            "elasticity.micro_batch_sizes must be a list of positive integers", micro_batch_sizes=value
        )
    return tuple(value)
