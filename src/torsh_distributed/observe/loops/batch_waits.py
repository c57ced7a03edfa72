"""How long a loop waits for its next batch: torch's DataLoader is timed where a job is observed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torsh_distributed.events import step_notes
from torsh_distributed.observe.loops.after_import import AfterImport

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
