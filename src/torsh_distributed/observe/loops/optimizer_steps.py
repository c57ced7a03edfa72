"""Steps of a loop without an Engine: torch calls back after every `optimizer.step()`, and that is a step.

For torch's own DDP and FSDP2 loops, trainers of others, and plain loops.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from typing import Any

from torsh_distributed import events
from torsh_distributed.observe.loops.after_import import AfterImport
from torsh_distributed.observe.loops.batch_waits import BatchWaits
from torsh_distributed.observe.loops.model_watch import Counted, ModelWatch

_ENGINE = "torsh_distributed.train.engine"
_OPTIMIZERS = "torch.optim.optimizer"
_active: dict[int, OptimizerSteps] = {}


class OptimizerSteps:
    """Emits a StepEvent and a PhaseEvent for each update. Where the Engine is in use, it tells of its steps itself."""

    def __init__(self, on_counted: Counted | None = None) -> None:
        self._num_steps = 0
        self._first: weakref.ref[Any] | None = None
        self._started_s = 0.0
        self._ended_s: float | None = None
        self._handles: list[Any] = []
        self._model = ModelWatch(on_counted if on_counted is not None else lambda num_flops, peak: None)
        self._batches = BatchWaits()
        self._later: AfterImport | None = None

    def install(self) -> None:
        """Ask torch to call back, now or once its optimizers are imported. One per process: an earlier one ends."""
        earlier = _active.get(os.getpid())
        if earlier is not None:
            earlier.remove()
        _active.clear()
        _active[os.getpid()] = self
        self._batches.install()
        self._later = AfterImport(_OPTIMIZERS, self._register)

    def _register(self, module: Any) -> None:
        self._handles = [
            module.register_optimizer_step_pre_hook(self._before),
            module.register_optimizer_step_post_hook(self._after),
        ]

    def remove(self) -> None:
        """Take the hooks away."""
        if _active.get(os.getpid()) is self:
            _active.clear()
        if self._later is not None:
            self._later.cancel()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._model.remove()
        self._batches.remove()

    def _before(self, optimizer: Any, args: object, kwargs: object) -> None:
        self._started_s = time.monotonic()

    def _after(self, optimizer: Any, args: object, kwargs: object) -> None:
        now_s = time.monotonic()
        is_engines = _ENGINE in sys.modules
        if not is_engines:
            took_s = now_s - self._started_s
            thread = threading.get_ident()
            events.emit(events.PhaseEvent(phase="optimizer", start_s=self._started_s, duration_s=took_s, thread=thread))
        if self._first is None or self._first() is None:
            self._first = weakref.ref(optimizer)
        if self._first() is not optimizer:
            return  # a loop with several optimizers, as of a GAN, steps when the first one does
        self._model.has_phases = not is_engines
        loss, num_samples = self._model.end_step()
        if is_engines:
            return
        since_s = self._ended_s if self._ended_s is not None else self._started_s
        self._ended_s = now_s
        self._num_steps += 1
        events.emit(
            events.StepEvent(
                step=self._num_steps,
                duration_s=now_s - since_s,
                loss=loss,
                num_samples=num_samples,
                learning_rate=_rate_of(optimizer),
            )
        )


def _rate_of(optimizer: Any) -> float | None:
    """The rate of the first group, unless reading it would wait for a device."""
    groups = getattr(optimizer, "param_groups", None)
    rate = groups[0].get("lr") if groups else None
    return float(rate) if isinstance(rate, int | float) else None
