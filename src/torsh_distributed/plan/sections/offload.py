"""What is kept outside device memory: the `offload` section of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field
from typing_extensions import override

from torsh_distributed.plan.problems import Problem
from torsh_distributed.plan.section import Section


class OffloadConfig(Section):
    """Training state in host memory or on disk, within fixed budgets."""

    enabled: bool = False
    """Turn offload on; the keys below say what is kept where."""

    params: bool = True
    """Keep parameters off the device, except those of the modules that are computing."""

    grads: bool = True
    """Keep gradients off the device."""

    optimizer_state: bool = True
    """Keep optimizer state off the device and update on the host. Required by `params` and `grads`;
    `device_optimizer_ratio` keeps a share of it on the device."""

    cpu_memory_budget_gb: float = Field(default=32.0, gt=0)
    """Host memory a rank may use for offload. What does not fit goes to `disk_dir`, or is refused before training."""

    gpu_memory_budget_gb: float = Field(default=2.0, gt=0)
    """Device memory a rank may use for parameters in use or prefetched, gradients, and state that stays there."""

    disk_dir: str | None = Field(default=None, min_length=1)
    """Directory of memory-mapped files for what does not fit in host memory. Left out: no disk is used."""

    disk_budget_gb: float = Field(default=256.0, gt=0)
    """Disk space a rank may use in `disk_dir`; it is reserved before training."""

    device_optimizer_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of the optimizer state that stays on the device and is updated there; it counts against
    `gpu_memory_budget_gb`."""

    prefetch_buffer_size: int = Field(default=16, ge=0)
    """Most units (layers) prefetched; the number in use follows the hit rate. 0 fetches on demand."""

    pin_cpu_memory: bool = True
    """Pin host memory, so copies to a GPU overlap with the computation."""

    cpu_compression: Literal["none", "fp16", "bf16", "int8", "lossless"] = "none"
    """Format of the state on the host. Smaller formats lose precision, except lossless."""

    auto_memory_management: Literal["conservative", "balanced", "aggressive", "extreme"] = "aggressive"
    """How early to react to memory pressure: at 90, 75, 60 or 40 % of a budget. `extreme` may also keep the optimizer's
    moments in a smaller format, which changes results; the others never do."""

    @override
    def find_problems(self) -> Iterator[Problem]:
        if self.enabled and not (self.params or self.grads or self.optimizer_state):
            yield Problem(
                "enabled",
                "offload.enabled is true, but offload.params, offload.grads and offload.optimizer_state are all false",
                "set at least one of them to true, or offload.enabled = false",
            )
        elif self.enabled and not self.optimizer_state:
            yield Problem(
                "optimizer_state",
                "offload.optimizer_state is false, but the update runs where the state is: parameters or gradients that"
                " leave the device would have to come back for it",
                "set offload.optimizer_state = true, and offload.device_optimizer_ratio to keep a share on the device",
            )
