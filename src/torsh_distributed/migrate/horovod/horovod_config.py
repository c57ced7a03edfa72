"""Settings of a Horovod job in one dict: a plan, with a verdict on every key. Imports no torch.

Horovod itself has no such file for training; its launcher's is read by `torsh run --as horovod --config-file`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from torsh_distributed.migrate.plan_draft import (
    ForeignConfig,
    PlanDraft,
    Reader,
    for_world,
    refused,
    same_by,
    stays,
    to_key,
    tuning,
)
from torsh_distributed.migrate.report import MigrationReport
from torsh_distributed.plan.plan import Plan
from torsh_distributed.plan.sections.compress import CompressConfig
from torsh_distributed.plan.sections.data import DdpConfig
from torsh_distributed.plan.sections.recovery import ElasticConfig

_METHODS = {
    "NONE": "none",
    "FP16": "fp16",
    "TOP_K": "topk:{}",
    "QUANTIZATION": "nbit:{}",
    "RANDOM_K": "randomk:{}",
    "THRESHOLD": "threshold:{}",
    "BERNOULLI": "bernoulli:{}",
    "GAUSSIAN": "gaussian:{}",
}
_DEFAULTS = {"TOP_K": 0.01, "QUANTIZATION": 8, "RANDOM_K": 0.01, "THRESHOLD": 0.01, "BERNOULLI": 0.01, "GAUSSIAN": 1.0}


def _compression(draft: PlanDraft, values: Mapping[str, Any]) -> None:
    name = str(values.get("type", "NONE")).upper()
    if name not in _METHODS:
        draft.problem(
            "gradient_compression.type", f"gradient_compression.type is {name}", f"known: {', '.join(_METHODS)}"
        )
        return
    number = values.get("parameter", _DEFAULTS.get(name))
    method = _METHODS[name].format(number)
    if name == "FP16":  # a cast: nothing is left out, so nothing is carried over
        draft.put("compress.error_feedback", "none")
        draft.put("compress.warmup_steps", 0)
    draft.honour("gradient_compression.type", values.get("type", "NONE"), "compress.method", method)
    rest = {key: value for key, value in values.items() if key not in ("type", "parameter")}
    if "parameter" in values:
        draft.accept("gradient_compression.parameter", number, f"compress.method = {method}")
    table: dict[str, Reader] = {
        "memory_optimization": to_key("compress.error_feedback", lambda value: "ef14" if value else "none"),
        "compression_period": to_key("compress.period", int),
    }
    draft.read(rest, table, "gradient_compression.")


def _threshold(draft: PlanDraft, key: str, value: Any) -> None:
    draft.honour(key, value, "ddp.max_bucket_size_mb", float(value))


_FUSION: dict[str, Reader] = {
    "enabled": to_key("ddp.bucketing", bool),
    "threshold_mb": _threshold,
    "cycle_time_ms": tuning("buckets leave when they are full, not in cycles"),
    "buffer_mb": tuning("buckets have their own memory"),
}
_TIMELINE: dict[str, Reader] = {
    "filename": stays("torsh run --trace DIR", "a Chrome trace of all ranks"),
    "mark_cycles": tuning("there are no cycles"),
    "sampling_rate": tuning("--trace-limit-mb bounds the file"),
    "include_memory": tuning("steps are recorded with their memory"),
}
_ELASTIC: dict[str, Reader] = {
    "min_workers": to_key("elastic.min_workers", int),
    "max_workers": to_key("elastic.max_workers", int),
    "initial_workers": stays("torsh run --nproc-per-node"),
    "discovery_server": refused("workers come and go by `torsh scale`"),
    "health_check_s": to_key("elastic.heartbeat_timeout_s", float),
    "state_broadcast_timeout_s": to_key("elastic.scaling_timeout_s", float),
}
_KEYS: dict[str, Reader] = {
    "backward_passes_per_step": to_key("training.gradient_accumulation", int),
    "gradient_accumulation_steps": to_key("training.gradient_accumulation", int),
    "custom_ops": refused("collectives are those of td; write yours with td.comm", unless=(None, [], {}, ())),
    "adasum": refused("hvd.DistributedOptimizer(op=hvd.Adasum) under torsh run --as horovod", unless=(None, False)),
    "average": same_by("", "gradients are means over ranks"),
}
_SECTIONS = ("gradient_compression", "optimizer_fusion", "timeline", "elastic")


class HorovodConfig(ForeignConfig):
    """Compression, fusion, timeline, elasticity and accumulation of a Horovod job."""

    @classmethod
    def default(cls) -> Self:
        """No compression, and buckets of Horovod's fusion threshold."""
        return cls({"optimizer_fusion": {"enabled": True, "threshold_mb": 64}})

    @classmethod
    def top_k(cls, share: float = 0.01) -> Self:
        """The largest elements of each gradient."""
        return cls({"gradient_compression": {"type": "TOP_K", "parameter": share}})

    @classmethod
    def elastic(cls, least: int, most: int) -> Self:
        """Between so many workers."""
        return cls({"elastic": {"min_workers": least, "max_workers": most}})

    def to_plan(self) -> tuple[Plan, MigrationReport]:
        """A plan, and the verdict on every key. Raises ConfigurationError for unknown keys and values."""
        draft = PlanDraft("horovod")
        passes = [self.values.get(name) for name in ("backward_passes_per_step", "gradient_accumulation_steps")]
        if all(isinstance(one, int) and one > 1 for one in passes) and passes[0] != passes[1]:
            draft.problem(
                "gradient_accumulation_steps",
                f"backward_passes_per_step {passes[0]} and gradient_accumulation_steps {passes[1]} say two things",
                "give one of them",
            )
        for name, value in self.values.items():
            if name in _SECTIONS and not isinstance(value, Mapping):
                draft.problem(name, f"{name} is a table of keys")
            elif name == "gradient_compression":
                _compression(draft, value)
            elif name == "optimizer_fusion":
                draft.read(value, _FUSION, f"{name}.")
            elif name == "timeline":
                draft.read(value, _TIMELINE, f"{name}.")
            elif name == "elastic":
                draft.put("elastic.enabled", True)
                draft.read(value, _ELASTIC, f"{name}.")
            elif name in _KEYS:
                _KEYS[name](draft, name, value)
            else:
                draft.unknown(name, [*_SECTIONS, *_KEYS])
        return draft.finish()

    def to_ddp_config(self) -> DdpConfig:
        """The `[ddp]` of the plan."""
        return self.to_plan()[0].ddp

    def to_compression_config(self) -> CompressConfig:
        """The `[compress]` of the plan."""
        return self.to_plan()[0].compress

    def to_elastic_config(self) -> ElasticConfig:
        """The `[elastic]` of the plan."""
        return self.to_plan()[0].elastic


def looks_like(document: Mapping[str, Any]) -> bool:
    """Whether a parsed file is of this kind, by the names at its top."""
    return bool({*_SECTIONS, "backward_passes_per_step"} & document.keys())


def translate(path: Path, **options: Any) -> tuple[Plan, MigrationReport]:
    """The plan of the file, and the report on it, for `torsh migrate FILE`."""
    return for_world(HorovodConfig.from_file(path).to_plan(), **options)
