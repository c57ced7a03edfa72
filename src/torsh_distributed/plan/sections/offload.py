"""What leaves the device's memory: the `offload` section of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field
from typing_extensions import override

from torsh_distributed.plan.problems import Problem
from torsh_distributed.plan.section import Section


class OffloadConfig(Section):
    """Sharded state kept in host memory or on disk, within a budget that is kept."""

    enabled: bool = False
    """Turn offload on; the keys below say what goes where."""

    params: bool = True
    """Keep parameters off the device, except those of the modules at work."""

    grads: bool = True
    """Keep gradients off the device."""

    optimizer_state: bool = True
    """Keep optimizer state off the device and update on the host. Parameters and gradients leave the device only with
    it; a part of it stays under `device_optimizer_ratio`."""

    cpu_memory_budget_gb: float = Field(default=32.0, gt=0)
    """Host memory a rank may use for it. What does not fit goes to `disk_dir`, or is refused before training."""

    gpu_memory_budget_gb: float = Field(default=2.0, gt=0)
    """Device memory a rank may use for parameters at work or fetched ahead, gradients, and state that stays there."""

    disk_dir: str | None = Field(default=None, min_length=1)
    """Directory of memory-mapped files for what the host memory cannot hold. Left out: no disk is used."""

    disk_budget_gb: float = Field(default=256.0, gt=0)
    """Disk space a rank may use in `disk_dir`; it is set aside before training."""

    device_optimizer_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of the optimizer state that stays on the device and is updated there; it counts against the device's
    budget."""

    prefetch_buffer_size: int = Field(default=16, ge=0)
    """Most units (layers) fetched ahead of their use; how many it is follows the hit rate. 0 fetches on demand."""

    pin_cpu_memory: bool = True
    """Lock host memory, so that copies to a GPU run beside the computation."""

    cpu_compression: Literal["none", "fp16", "bf16", "int8", "lossless"] = "none"
    """Form in which the state is held on the host. Smaller forms lose precision, except lossless."""

    auto_memory_management: Literal["conservative", "balanced", "aggressive", "extreme"] = "aggressive"
    """How early memory pressure is answered: at 90, 75, 60 or 40 % of a budget. Extreme may also hold the optimizer's
    moments in a smaller form, which changes results; the others never do."""

    @override
    def find_problems(self) -> Iterator[Problem]:
        if self.enabled and not (self.params or self.grads or self.optimizer_state):
            yield Problem(
                "enabled",
                "enabled is true, but params, grads and optimizer_state are all false",
                "choose at least one of them, or set enabled = false",
            )
        elif self.enabled and not self.optimizer_state:
            yield Problem(
                "optimizer_state",
                "optimizer_state is false, but the update is done where the state is: parameters or gradients "
                "that leave the device would come back for it",
                "set optimizer_state = true, and device_optimizer_ratio to keep a share of it on the device",
            )
