"""What the engine needs to know of a DeepSpeed config: batch sizes, stage, number formats, clipping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.migrate.deepspeed.config.batch_triangle import BatchTriangle
from torsh_distributed.migrate.deepspeed.deepspeed_errors import require

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
