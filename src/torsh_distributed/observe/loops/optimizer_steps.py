"""Steps of a loop without an Engine: torch calls back after every `optimizer.step()`, and that is a step.

For torch's own DDP and FSDP2 loops, trainers of others, and plain loops.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from torsh_distributed import events
from torsh_distributed.events import step_notes
from torsh_distributed.observe.loops.after_import import AfterImport
from torsh_distributed.observe.loops.model_watch import Counted, ModelWatch

_DETAIL_S = 0.35e-3
"""What it costs to see the forward, the backward and the loss of a step, measured between the operations of a model."""
_SHARE = 0.0005
_LONGEST = 256
_FIRST_STEPS = 4
"""The model is found in the second one; the first ones allocate and compile."""


class StepSampling:
    """A step in so many that looking costs a twentieth of a per cent: of steps of 700 ms all, of 30 ms each 32nd.

    The interval is a power of two and steps are chosen by their number, so ranks choose the same ones without talking.
    """

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None
        self._usual_s: float | None = None

    def add(self, step: int, now_s: float) -> None:
        """That step ended now; steps between two calls count by their mean."""
        if self._last is not None and step > self._last[0]:
            self._usual_s = (now_s - self._last[1]) / (step - self._last[0])
        self._last = (step, now_s)

    @property
    def interval(self) -> int:
        """One step of how many is looked at."""
        interval = 1
        while self._usual_s is not None and interval < _LONGEST and interval * _SHARE * self._usual_s < _DETAIL_S:
            interval *= 2
        return interval

    def next_step(self, step: int) -> int:
        """The next one after `step` that is looked at."""
        interval = self.interval if step >= _FIRST_STEPS else 1
        # Soon after a power of ten as well: operations are counted there.
        counted = 1
        while counted + 1 <= step:
            counted *= 10
        return min((step // interval + 1) * interval, counted + 1)


_LOADER = "torch.utils.data.dataloader"


class BatchWaits:
    """Times `next()` on the iterators of every DataLoader of this process, as the phase `data`."""

    def __init__(self) -> None:
        self._kind: Any = None
        self._next: Callable[[Any], Any] | None = None
        self._later: AfterImport | None = None

    def install(self) -> None:
        """Time them from now on, or from the moment on when torch's loader is imported."""
        self._later = AfterImport(_LOADER, self._wrap)

    def _wrap(self, module: Any) -> None:
        kind = module._BaseDataLoaderIter
        original: Callable[[Any], Any] = kind.__next__

        def timed(iterator: Any) -> Any:
            started_s, cpu_s = time.monotonic(), time.thread_time()
            item = original(iterator)
            step_notes.note_phase("data", started_s, time.monotonic(), (cpu_s, time.thread_time()))
            return item

        self._kind, self._next = kind, original
        kind.__next__ = timed

    def remove(self) -> None:
        """Let torch's own method be called again."""
        if self._later is not None:
            self._later.cancel()
        kind, self._kind = self._kind, None
        if kind is not None:
            kind.__next__ = self._next


_OPTIMIZERS = "torch.optim.optimizer"
_active: dict[int, OptimizerSteps] = {}


class OptimizerSteps:
    """Tells of each update, and of its part of the step. Where the Engine is in use, it tells of its steps itself."""

    def __init__(
        self, on_counted: Counted | None = None, on_averaged_group: Callable[[str], None] | None = None
    ) -> None:
        self._num_steps = 0
        self._first: weakref.ref[Any] | None = None
        self._started_s: float | None = None
        self._num_samples: int | None = None
        self._sampling = StepSampling()
        self._looks_at = 1
        self._ended_s: float | None = None
        self._handles: list[Any] = []
        self._before_hooks: dict[int, Any] = {}
        self._before_id = 0
        self._model = ModelWatch(
            on_counted if on_counted is not None else lambda num_flops, peak: None,
            on_averaged_group if on_averaged_group is not None else lambda group: None,
        )
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
        before = module.register_optimizer_step_pre_hook(self._before)
        self._handles = [before, module.register_optimizer_step_post_hook(self._after)]
        # torch's own dictionary: the hook comes and goes, and to register it each time costs more than it does.
        self._before_hooks, self._before_id = module._global_optimizer_pre_hooks, before.id

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
        # Most steps do little more than what is in this function: it runs between two of them, with cold caches.
        now_s = time.monotonic()
        started_s, self._started_s = self._started_s, None
        first = self._first() if self._first is not None else None
        if first is None:
            self._first, first = weakref.ref(optimizer), optimizer
        is_engines = step_notes.has_engine()
        if first is not optimizer:
            # A loop with several optimizers, as of a GAN, steps when the first one does.
            if started_s is not None and not is_engines:
                step_notes.note_phase("optimizer", started_s, now_s)
            return
        self._num_steps += 1
        loss = None
        if self._num_steps >= self._looks_at:
            loss = self._look(now_s, is_engines=is_engines)
        since_s, self._ended_s = self._ended_s, now_s
        if is_engines:
            return
        step_notes.note_step(
            step_notes.StepNote(
                threading.get_ident(),
                started_s,
                now_s,
                time.thread_time(),
                self._num_steps,
                now_s - (since_s or started_s or now_s),
                loss,
                self._num_samples,
                _rate_of(optimizer),
            )
        )

    def _look(self, now_s: float, *, is_engines: bool) -> float | None:
        """Take what was seen of a step that was watched, and choose the next one; returns its loss."""
        model, sampling = self._model, self._sampling
        model.has_phases = not is_engines
        sampling.add(self._num_steps, now_s)
        is_always = model.needs_every_step or events.wanted(events.PhaseEvent, is_noted=True)
        ahead = 1 if is_always else sampling.next_step(self._num_steps) - self._num_steps
        watches_next = ahead == 1 and not is_engines
        loss, num_samples = model.end_step(self._num_steps, watches_next=watches_next)
        if watches_next:
            self._before_hooks[self._before_id] = self._before
        else:
            self._before_hooks.pop(self._before_id, None)
        # Between two steps that are looked at, batches are taken to be as large as in the last one.
        self._num_samples = num_samples if num_samples is not None else self._num_samples
        # At the end of the step before the one that is watched its hooks are set, at its end they are read.
        self._looks_at = self._num_steps + max(1, ahead - 1)
        return loss


def _rate_of(optimizer: Any) -> float | None:
    """The rate of the first group, unless reading it would wait for a device."""
    groups = getattr(optimizer, "param_groups", None)
    rate = groups[0].get("lr") if groups else None
    if type(rate) is float:
        return rate
    return float(rate) if isinstance(rate, int) else None
