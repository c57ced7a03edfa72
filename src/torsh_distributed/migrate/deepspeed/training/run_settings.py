"""What the engine needs to know of a DeepSpeed config: batch sizes, stage, number formats, clipping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.migrate.deepspeed.config.translators.batch_keys import BatchTriangle
from torsh_distributed.migrate.deepspeed.deepspeed_errors import require
from torsh_distributed.plan import Plan

DEFAULT_CLIPPING = 1.0
"""`gradient_clipping` of a config that does not have the key, since DeepSpeed 0.19.4; it was 0.0 before."""
_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "fp16": torch.float16,
    "float16": torch.float16,
    "half": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}


@dataclass
class RunSettings:
    """A config as the engine reads it. `config` is the config itself, without "auto"."""

    config: Mapping[str, Any]
    batch: BatchTriangle
    num_ranks: int
    """Ranks with their own part of every batch."""
    plan: Plan | None = None
    """What the config is as a plan; None for a pipeline, whose plan comes from its module."""
    stage: int = field(init=False)
    dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        self.stage = _stage(self.section("zero_optimization"), self.config.get("zero_optimization"))
        is_fp16, is_bf16 = bool(self.section("fp16").get("enabled")), bool(self.bf16.get("enabled"))
        require(
            not (is_fp16 and is_bf16),
            "fp16 and bf16 modes cannot be simultaneously enabled",
            hint='set "enabled" of one of the two sections to false',
        )
        self.dtype = torch.float16 if is_fp16 else torch.bfloat16 if is_bf16 else torch.float32

    def section(self, name: str) -> Mapping[str, Any]:
        """A section of the config; empty if the config has none."""
        found = self.config.get(name)
        return found if isinstance(found, Mapping) else {}

    @property
    def bf16(self) -> Mapping[str, Any]:
        """The section `bf16`, also under its older name."""
        return self.section("bf16") or self.section("bfloat16")

    def value(self, path: str, default: Any = None) -> Any:
        """A value by its dotted path: `zero_optimization.reduce_bucket_size`."""
        found: Any = self.config
        for part in path.split("."):
            if not isinstance(found, Mapping) or part not in found:
                return default
            found = found[part]
        return default if found == "auto" else found

    @property
    def is_managed(self) -> bool:
        """Whether the engine counts microbatches; if not, each `step()` ends an accumulation."""
        return bool(self.config.get("managed_gradient_accumulation", True))

    @property
    def clipping(self) -> float:
        """The largest norm of the gradient; 0 for any."""
        found = self.config.get("gradient_clipping", DEFAULT_CLIPPING)
        return 0.0 if found is None else float(DEFAULT_CLIPPING if found == "auto" else found)

    @property
    def skips_overflow(self) -> bool:
        """Whether a step with gradients that are not finite is skipped: not without ZeRO in fp32, as in DeepSpeed."""
        if self.dtype is torch.float32:
            return self.stage > 0
        if self.dtype is torch.bfloat16 and self.stage in (1, 2):
            return bool(self.bf16.get("check_grad_overflow", True))
        return True

    @property
    def sums_gradients(self) -> bool:
        """Whether gradients are summed over the ranks, not averaged."""
        operation = self.config.get("gradient_allreduce_op", "mean")
        if operation not in ("mean", "sum"):
            raise ConfigurationError('gradient_allreduce_op is "mean" or "sum"', got=operation)
        require(
            operation == "mean" or self.stage < 3,
            'gradient_allreduce_op "sum" works with ZeRO stages 0 to 2',
            hint="multiply the loss by the number of ranks under stage 3",
        )
        return bool(operation == "sum")

    @property
    def reduce_dtype(self) -> str:
        """The format in which gradients are summed, in the words of a plan."""
        name = self.config.get("communication_data_type")
        if name is None:
            return "same"
        if name not in _DTYPES:
            raise ConfigurationError(
                f"Invalid communication_data_type. Supported data types: ['fp16', 'bf16', 'fp32']. Got: {name}"
            )
        chosen = _DTYPES[name]
        short = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[chosen]
        return "same" if chosen is self.dtype else short

    @property
    def accumulates_in_fp32(self) -> bool:
        """Whether 16-bit gradients are added up in fp32 over the microbatches."""
        name = self.value("data_types.grad_accum_dtype")
        return name is not None and _DTYPES.get(name) is torch.float32 and self.dtype is not torch.float32

    @property
    def has_fp32_shards(self) -> bool:
        """Whether shards are fp32 and cast to 16 bits as they are gathered: then gradients add up in fp32."""
        if not self.accumulates_in_fp32 or self.batch.accumulation == 1:
            return False
        require(
            self.stage >= 1 and self.dtype is torch.bfloat16,
            "data_types.grad_accum_dtype fp32 works with bf16 and zero_optimization.stage 1, 2 or 3",
            hint="use one of these stages, or leave the key out: gradients then add up in the module's format",
        )
        return True

    @property
    def master_dtype(self) -> torch.dtype:
        """The format of the masters: fp32, unless the config keeps all in 16 bits."""
        names = {
            torch.float16: "fp16.fp16_master_weights_and_grads",
            torch.bfloat16: "bf16.bf16_master_weights_and_grads",
        }
        is_narrow = self.dtype in names and bool(self.value(names[self.dtype], False))
        return self.dtype if is_narrow else torch.float32

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The format in which `torch_autocast` computes; None if it is off."""
        if not self.value("torch_autocast.enabled", False):
            return None
        chosen = _DTYPES.get(str(self.value("torch_autocast.dtype", "bfloat16")).removeprefix("torch."))
        require(
            chosen is torch.bfloat16 and self.dtype is torch.float32,
            "torch_autocast works in bfloat16, and without fp16 and bf16",
            hint="use the section bf16, or torch_autocast with dtype bfloat16 alone",
        )
        return chosen

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the optimizer's state and its update are in host memory."""
        device = self.value("zero_optimization.offload_optimizer.device", "none")
        return device in ("cpu", "nvme") or bool(self.value("zero_optimization.cpu_offload", False))

    @property
    def offloads_params(self) -> bool:
        """Whether parameters are in host memory while they do not compute."""
        device = self.value("zero_optimization.offload_param.device", "none")
        return device in ("cpu", "nvme") or bool(self.value("zero_optimization.cpu_offload_param", False))


def _stage(section: Mapping[str, Any], given: Any) -> int:
    """`zero_optimization` is a section, or true for stage 1 in old configs."""
    if isinstance(given, bool):
        return int(given)
    stage = section.get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ConfigurationError("zero_optimization.stage is 0, 1, 2 or 3", got=stage)
    return int(stage)
