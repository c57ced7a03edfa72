"""What is sampled while steps are done: nothing runs beside training, and a process that hangs samples nothing."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

from torsh_distributed import events


class StepSamples(ABC):
    """Takes a sample after steps that are `interval_s` or more apart, in their thread; from its making on."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._next_s = 0.0
        self._unsubscribe = events.subscribe(self._after_step, events.StepEvent)

    @abstractmethod
    def sample(self) -> None:
        """Emit what is measured now."""

    def close(self) -> None:
        """Emit no more."""
        self._unsubscribe()

    def _after_step(self, event: events.Event) -> None:
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + self._interval_s
            self.sample()
