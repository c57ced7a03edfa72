"""One update as DeepSpeed does it: measure the gradient, skip or clip, update, count.

The norm of 16-bit gradients and the factor that clips them are rounded where DeepSpeed rounds them.
In 16 bits a factor that differs in its last bit rounds some parameter the other way, which is visible in the loss.
Without ZeRO DeepSpeed adds up in fp32, parameter by parameter; under ZeRO in fp64 on each rank, and over the ranks in
fp32 (stages 1 and 2) or fp64 (stage 3).
"""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from torsh_distributed import events
from torsh_distributed.migrate.deepspeed.training.loss_scales import LossScaler
from torsh_distributed.migrate.deepspeed.training.master_weights import MasterWeights
from torsh_distributed.migrate.deepspeed.training.run_settings import RunSettings
from torsh_distributed.parallel.data.data_strategy import DataParallel
from torsh_distributed.parallel.expert.expert_strategy import ExpertDataParallel
from torsh_distributed.parallel.mesh.mesh_reduction import held_by_placement, multiply, sum_of_squares
from torsh_distributed.parallel.sharded.sharded_strategy import Sharded
from torsh_distributed.parallel.strategy import PendingNumber
from torsh_distributed.train.engine import Engine


@torch.no_grad()
def scaled_norm(core: Engine, stage: int) -> Tensor:
    """The norm of the whole gradient, still times the loss scale; every rank calls this.

    For modules in 16 bits whose strategy is replicas or shards.
    """
    if isinstance(core.strategy, Sharded):
        core.strategy.wrapped.average_replicated()
    grads = [param.grad for param in core.unwrapped.parameters() if param.grad is not None]
    if stage == 0:
        total = torch.zeros(())
        for grad in grads:
            total = total + grad.float().norm() ** 2
        return total.double().sqrt()
    device = grads[0].device if grads else torch.device("cpu")
    squares = sum_of_squares(held_by_placement(grads), device, torch.float64)
    return squares.sqrt() if stage == 3 else squares.float().sqrt()


def factor_of(norm: Tensor, *, scale: float, clipping: float) -> float:
    """What gradients of this scaled norm are multiplied by: undoes the loss scale, and clips unless `clipping` is 0."""
    if clipping <= 0:
        return 1.0 / scale
    excess = torch.clamp((norm / scale + 1e-6) / clipping, min=1.0)
    return float(1.0 / (excess * scale))


class UpdateStep:
    """Applies accumulated gradients; every rank makes the same calls.

    Gradients are still multiplied by the loss scale. Those of masters get their factor in fp32, since a 16-bit gradient
    that is scaled in place would be rounded a second time.
    """

    def __init__(self, core: Engine, settings: RunSettings, scaler: LossScaler) -> None:
        self._core, self._settings = core, settings
        self.scaler = scaler
        self.overflow = False
        """Whether the last update was skipped."""
        self.norm: float | None = None
        """The norm of the last update's gradient, before it was clipped."""
        self._started = time.monotonic()
        self._losses: list[Tensor] = []
        self._mean: PendingNumber | None = None

    def began(self) -> None:
        """The first forward of an update begins."""
        if not self._losses:
            self._started = time.monotonic()

    def add_loss(self, share: Tensor, *, is_last: bool) -> None:
        """One microbatch's part of this rank's loss; the last starts the mean over ranks, which events report."""
        self._losses.append(share.detach())
        if is_last:
            total = (
                self._losses[0] if len(self._losses) == 1 else torch.stack([one.float() for one in self._losses]).sum()
            )
            self._mean = self._core.strategy.mean_loss(total)

    def set_mean(self, loss: PendingNumber) -> None:
        """The mean loss of the update, where the engine averages it itself."""
        self._mean = loss

    def run(self) -> None:
        """Update the parameters, or skip the step; gradients are cleared either way."""
        core, scale = self._core, self.scaler.loss_scale
        loss = None if self._mean is None else self._mean.wait()
        self._losses, self._mean = [], None
        with events.phase("optimizer"):
            try:
                self._apply(scale)
            finally:
                core.optimizer.zero_grad(set_to_none=True)
        if self.overflow:
            core.num_skipped += 1
        else:
            core.num_steps += 1
        events.reached("step", core.num_steps)
        if events.wanted(events.StepEvent):
            events.emit(
                events.StepEvent(
                    step=core.num_steps + int(self.overflow),
                    loss=loss,
                    duration_s=time.monotonic() - self._started,
                    comm_s=core.strategy.take_comm_s(),
                    num_samples=self._settings.batch.train,
                    grad_norm=self.norm,
                    learning_rate=float(core.optimizer.param_groups[0]["lr"]),
                    loss_scale=scale if self._settings.dtype is torch.float16 else None,
                    is_skipped=self.overflow,
                )
            )

    def _apply(self, scale: float) -> None:
        core, settings = self._core, self._settings
        total = self._factor_of_sum()
        measured = self._measured()
        measured = measured if total == 1.0 else measured * total
        scaled = float(measured)
        self.overflow = settings.skips_overflow and not math.isfinite(scaled)
        self.scaler.update_scale(self.overflow)
        if self.scaler.loss_scale != scale:
            core.strategy.rescale(self.scaler.loss_scale / scale)
        if self.overflow:
            self.norm = math.inf
            return
        self.norm = scaled / scale
        # By the scale that the gradients have; DeepSpeed divides by the next one, twice as large when it grows.
        factor = factor_of(measured, scale=scale, clipping=settings.clipping) * total
        if isinstance(core.optimizer, MasterWeights):
            core.optimizer.gradient_factor = factor
        elif factor != 1.0:
            multiply((param.grad for param in core.unwrapped.parameters() if param.grad is not None), factor)
        core.optimizer.step()

    def _measured(self) -> Tensor:
        """The norm of the gradient as it is, times the loss scale."""
        strategy = self._core.strategy
        is_equal = isinstance(strategy, DataParallel | Sharded) and not isinstance(strategy, ExpertDataParallel)
        if self._settings.dtype is torch.float32 or not is_equal:
            return strategy.clip_grad_norm(None)
        return scaled_norm(self._core, self._settings.stage)

    def _factor_of_sum(self) -> float:
        """Strategies average; a config may ask for sums."""
        return float(self._core.strategy.data_degree) if self._settings.sums_gradients else 1.0
