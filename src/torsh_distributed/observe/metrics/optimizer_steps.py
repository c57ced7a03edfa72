"""Steps of a loop without an Engine: torch calls back after every `optimizer.step()`, and that is a step.

For torch's own DDP and FSDP2 loops, trainers of others, and plain loops. The loss is not known here.
"""

from __future__ import annotations

import sys
import time
import weakref
from typing import Any

from torsh_distributed import events

_ENGINE = "torsh_distributed.train.engine"


class OptimizerSteps:
    """Emits a StepEvent and a PhaseEvent for each update. Where the Engine is in use, it tells of its steps itself."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._first: weakref.ref[Any] | None = None
        self._started_s = 0.0
        self._ended_s: float | None = None
        self._handles: list[Any] = []

    def install(self) -> bool:
        """Ask torch to call back, once torch's optimizers are imported; whether it does."""
        if self._handles:
            return True
        module = sys.modules.get("torch.optim.optimizer")
        post = getattr(module, "register_optimizer_step_post_hook", None)
        if module is None or post is None:  # not imported, or being imported at this moment
            return False
        self._handles = [module.register_optimizer_step_pre_hook(self._before), post(self._after)]
        return True

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before(self, optimizer: Any, args: object, kwargs: object) -> None:
        self._started_s = time.monotonic()

    def _after(self, optimizer: Any, args: object, kwargs: object) -> None:
        if _ENGINE in sys.modules:
            return
        now_s = time.monotonic()
        events.emit(events.PhaseEvent(phase="optimizer", start_s=self._started_s, duration_s=now_s - self._started_s))
        if self._first is None or self._first() is None:
            self._first = weakref.ref(optimizer)
        if self._first() is not optimizer:
            return  # a loop with several optimizers, as of a GAN, steps when the first one does
        since_s = self._ended_s if self._ended_s is not None else self._started_s
        self._ended_s = now_s
        self._num_steps += 1
        events.emit(
            events.StepEvent(step=self._num_steps, duration_s=now_s - since_s, learning_rate=_rate_of(optimizer))
        )


def _rate_of(optimizer: Any) -> float | None:
    """The rate of the first group, unless reading it would wait for a device."""
    groups = getattr(optimizer, "param_groups", None)
    rate = groups[0].get("lr") if groups else None
    return float(rate) if isinstance(rate, int | float) else None
