"""Batch sizes, clipping and accumulation, as [training]; the elastic batch.

train_batch_size = train_micro_batch_size_per_gpu × gradient_accumulation_steps × data parallel ranks.
Any two imply the third, one of the sizes alone implies an accumulation of 1; a contradiction is an error that shows the
whole equation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.migrate.deepspeed.config.translation import Translation
from torsh_distributed.migrate.deepspeed.config.translators.mesh_keys import degree
from torsh_distributed.migrate.deepspeed.elasticity import BATCH_KEYS, ElasticSettings, elastic_batch
from torsh_distributed.migrate.report import Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchTriangle:
    """All three, for a number of data parallel ranks."""

    train: int
    micro: int
    accumulation: int


def resolve_batch(
    train: int | None, micro: int | None, accumulation: int | None, data_ranks: int | None
) -> BatchTriangle | None:
    """The three sizes from those that are given. None if the number of data parallel ranks is needed and not known.

    Raises ConfigurationError if they contradict each other, or if there is nothing to begin with.
    """
    if train is None and micro is None:
        raise ConfigurationError(
            "the config has no batch size: either train_batch_size or train_micro_batch_size_per_gpu is needed",
            hint="add train_batch_size, the samples of one optimizer update over all ranks",
        )
    if data_ranks is None:
        return None
    if train is None:
        assert micro is not None, "one of the two is given"
        passes = accumulation or 1
        return BatchTriangle(train=micro * passes * data_ranks, micro=micro, accumulation=passes)
    if micro is None:
        passes = accumulation or 1
        _require(train, train // data_ranks // passes, passes, data_ranks)
        return BatchTriangle(train=train, micro=train // data_ranks // passes, accumulation=passes)
    passes = train // micro // data_ranks if accumulation is None else accumulation
    _require(train, micro, passes, data_ranks)
    return BatchTriangle(train=train, micro=micro, accumulation=passes)


def _require(train: int, micro: int, passes: int, data_ranks: int) -> None:
    if micro > 0 and passes > 0 and train == micro * passes * data_ranks:
        return
    whole = max(1, micro) * max(1, passes) * data_ranks
    raise ConfigurationError(
        f"train_batch_size {train} is not train_micro_batch_size_per_gpu {micro} × gradient_accumulation_steps {passes}"
        f" × {data_ranks} data parallel ranks = {micro * passes * data_ranks}",
        hint=f"set train_batch_size to {whole}, or leave out one of the three: it follows from the others",
        train_batch_size=train,
    )


CLIPS_BY_DEFAULT = (0, 19, 2)
"""Versions after 0.19.1 clip at 1.0 where a config is silent; earlier ones do not clip."""


def translate_batch(one: Translation) -> None:
    """The batch, what an update is made of, and how often progress is printed."""
    _sizes(one)
    _clipping(one)
    if one.get("managed_gradient_accumulation"):
        one.honoured("managed_gradient_accumulation", "", "Engine.step is one update")
    else:
        one.equivalent("managed_gradient_accumulation", "torsh run --as deepspeed", "there step() is the boundary")
    if str(one.get("gradient_allreduce_op")).lower() == "sum":
        one.refuse("gradient_allreduce_op", "gradients are averaged: multiply the loss by the number of ranks")
    else:
        one.honoured("gradient_allreduce_op")
    if one.has("steps_per_print"):
        one.honoured("steps_per_print", one.set("training.log_every", int(one.get("steps_per_print"))))
    size = one.get("vocabulary_size")
    if size is not None and int(size) % 8:
        one.hint("vocabulary_size", f"{size} is not a multiple of 8: a padded vocabulary is faster on tensor cores")
    else:
        one.honoured("vocabulary_size", "", "a multiple of 8")


def data_ranks(one: Translation) -> int | None:
    """The ranks that have samples of their own; None without a world size."""
    if one.world_size is None:
        return None
    parts = degree(one, "tp") * degree(one, "pp") * degree(one, "cp")
    if one.world_size % parts:
        one.wrong(
            "sequence_parallel_size",
            f"a world of {one.world_size} ranks does not divide into tensor {degree(one, 'tp')} × pipeline"
            f" {degree(one, 'pp')} × sequence {degree(one, 'cp')} = {parts} parts",
        )
        return None
    return one.world_size // parts


def _sizes(one: Translation) -> None:
    try:
        if one.is_on("elasticity"):
            _elastic(one)
            return
        train, micro, passes = (_whole(one.get(key)) for key in BATCH_KEYS)
        found = resolve_batch(train, micro, passes, data_ranks(one))
    except ConfigurationError as error:
        one.wrong("train_batch_size", error.message, error.hint or "")
        return
    if found is not None:
        _set_sizes(one, found)
    elif train is None or (micro is not None and passes is None):
        one.wrong(
            "train_micro_batch_size_per_gpu",
            "the batch follows from train_micro_batch_size_per_gpu and the number of ranks, which is not known",
            "give the number of ranks: world_size=N, or --world N",
        )
    else:
        accumulation = passes or 1
        one.honoured("train_batch_size", one.set("training.batch_size", train))
        one.honoured("gradient_accumulation_steps", _set_passes(one, accumulation))
        one.honoured("train_micro_batch_size_per_gpu", "training.batch_size / gradient_accumulation / ranks")


def _set_sizes(one: Translation, found: BatchTriangle) -> None:
    means = one.set("training.batch_size", found.train)
    one.honoured("train_batch_size", means)
    passes = _set_passes(one, found.accumulation)
    one.honoured("gradient_accumulation_steps", passes)
    one.honoured("train_micro_batch_size_per_gpu", means, f"{found.micro} on each of the ranks in each pass")


def _set_passes(one: Translation, accumulation: int) -> str:
    """In a pipeline DeepSpeed's accumulation is the number of microbatches of one pass."""
    if degree(one, "pp") > 1:
        if accumulation < degree(one, "pp"):
            one.set("pipeline.schedule", "gpipe")  # 1F1B begins with a microbatch for every stage
        return one.set("pipeline.num_microbatches", accumulation)
    return one.set("training.gradient_accumulation", accumulation)


def _elastic(one: Translation) -> None:
    section: dict[str, Any] = one.values["elasticity"]
    given = [key for key in BATCH_KEYS if one.has(key)]
    if given and not one.get("elasticity.ignore_non_elastic_batch_info"):
        one.wrong(
            given[0],
            f"elasticity decides the batch, but {', '.join(given)} is given too",
            "take it out, or set elasticity.ignore_non_elastic_batch_info to true",
        )
        return
    settings = ElasticSettings.from_section(section)
    found = elastic_batch(settings, one.world_size or 0)
    means = one.set("training.batch_size", found.train_batch_size)
    sizes = f"{found.world_sizes[0]} to {found.world_sizes[-1]} data parallel ranks divide it"
    for name in section:
        one.honoured(f"elasticity.{name}", means if name in ("enabled", "max_train_batch_size") else "")
    one.hint("elasticity.min_time", "the scheduler of the cluster says how long a job runs")
    one.honoured("elasticity.enabled", means, f"{sizes}; see also [elastic]")
    one.honoured("elasticity.max_gpus", one.set("elastic.max_workers", settings.max_gpus))
    one.honoured("elasticity.min_gpus", one.set("elastic.min_workers", settings.min_gpus))
    for key in given:
        one.honoured(key, "", "off: elasticity.ignore_non_elastic_batch_info")
    ranks = data_ranks(one)
    if found.micro_batch_size is not None and ranks:
        _set_passes(one, found.train_batch_size // found.micro_batch_size // ranks)


def _clipping(one: Translation) -> None:
    if one.has("gradient_clipping"):
        limit = float(one.get("gradient_clipping"))
        one.honoured("gradient_clipping", one.set("training.gradient_clipping", limit) if limit > 0 else "", "")
        return
    if one.version >= CLIPS_BY_DEFAULT:
        one.give_default(
            "gradient_clipping",
            1.0,
            Verdict.HONOURED,
            one.set("training.gradient_clipping", 1.0),
            "DeepSpeed clips at 1.0 unless told otherwise since June 2026, after 0.19.1; before, it did not clip",
        )
    else:
        one.give_default(
            "gradient_clipping", 0.0, Verdict.HONOURED, "", "this version of DeepSpeed clips only if it is told to"
        )


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)
