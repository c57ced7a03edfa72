"""Memory of this process as events, about once a second while steps are done: trends of it tell of trouble early."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod

from typing_extensions import override

from torsh_distributed import events
from torsh_distributed.observe.metrics.host_memory import host_memory


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
        """Stop emitting."""
        self._unsubscribe()

    def _after_step(self, event: events.Event) -> None:
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + self._interval_s
            self.sample()


class MemorySamples(StepSamples):
    """Emits a MemoryEvent for the host, and for the GPU in use, after steps that are `interval_s` or more apart."""

    def __init__(self, *, interval_s: float = 1.0) -> None:
        self._peak_bytes = 0
        super().__init__(interval_s)

    @override
    def sample(self) -> None:
        used, limit = host_memory()
        self._peak_bytes = max(self._peak_bytes, used)
        events.emit(
            events.MemoryEvent(device="host", allocated_bytes=used, peak_bytes=self._peak_bytes, limit_bytes=limit)
        )
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            device = torch.cuda.current_device()
            events.emit(
                events.MemoryEvent(
                    device=f"cuda:{device}",
                    allocated_bytes=torch.cuda.memory_reserved(device),
                    peak_bytes=torch.cuda.max_memory_reserved(device),
                    limit_bytes=torch.cuda.get_device_properties(device).total_memory,
                )
            )
