"""DeepSpeed's timers: `timers("fwd").start()`, `.stop()`, `.elapsed()`, and samples per second."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

_log = logging.getLogger(__name__)


def wait_for_device() -> None:
    """Let the clock see what a GPU has to do."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # untyped in torch
        torch.cuda.synchronize()


class WallClockTimer:
    """One timer, in milliseconds; it waits for the device at both ends."""

    def __init__(self, name: str) -> None:
        self.name_ = name
        self.started_ = False
        self._began = 0.0
        self._records: list[float] = []

    def start(self) -> None:
        """Begin a measurement."""
        wait_for_device()
        self._began, self.started_ = time.perf_counter(), True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """End it."""
        wait_for_device()
        self._records.append((time.perf_counter() - self._began) * 1000.0)
        self.started_ = False

    def reset(self) -> None:
        """Forget all measurements."""
        self.started_, self._records = False, []

    def elapsed(self, reset: bool = True) -> float:
        """Milliseconds of all measurements since the last reset."""
        total = sum(self._records)
        if reset:
            self._records = []
        return total

    def mean(self) -> float:
        """Milliseconds of one measurement."""
        return sum(self._records) / len(self._records) if self._records else 0.0


class SynchronizedWallClockTimer:
    """Timers by name."""

    def __init__(self) -> None:
        self.timers: dict[str, WallClockTimer] = {}

    def __call__(self, name: str) -> WallClockTimer:
        """The timer of this name."""
        return self.timers.setdefault(name, WallClockTimer(name))

    def get_timers(self) -> Mapping[str, WallClockTimer]:
        """All timers."""
        return self.timers

    def means(self) -> dict[str, float]:
        """The mean of each timer that measured."""
        return {name: timer.mean() for name, timer in self.timers.items() if timer.mean() > 0}

    def get_mean(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """The mean of each of these."""
        found = {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}
        if reset:
            for name in found:
                self.timers[name].reset()
        return found

    def log(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True, **_: object) -> None:
        """Write one line with the times of these timers."""
        found = {name: self.timers[name].elapsed(reset=reset) / normalizer for name in names if name in self.timers}
        if found:
            _log.info("time (ms) | %s", " | ".join(f"{name}: {value:.2f}" for name, value in found.items()))


class NoopTimer:
    """In the place of the timers where nothing is measured: `timer("forward").start()` does nothing."""

    class Timer:
        """Measures nothing."""

        def start(self) -> None:
            """Nothing."""

        def stop(self, **_: object) -> None:
            """Nothing."""

        def reset(self) -> None:
            """Nothing."""

        def elapsed(self, **_: object) -> float:
            """No time."""
            return 0.0

        def mean(self) -> float:
            """No time."""
            return 0.0

    def __init__(self) -> None:
        self.timer = self.Timer()

    def __call__(self, name: str) -> Timer:
        """The same timer under every name."""
        return self.timer

    def get_timers(self) -> dict[str, Any]:
        """None."""
        return {}

    def log(self, names: Sequence[str], **_: object) -> None:
        """Nothing."""

    def get_mean(self, names: Sequence[str], **_: object) -> None:
        """Nothing."""


class ThroughputTimer:
    """Samples per second over all ranks, from the third step on."""

    def __init__(self, batch_size: int, *, start_step: int = 2) -> None:
        self.batch_size, self.start_step = batch_size, start_step
        self.global_step_count = 0
        self.total_elapsed_time = 0.0
        self._last: float | None = None

    def count(self, batch_size: int) -> None:
        """One update is done; the host's clock, without waiting for the device."""
        now = time.perf_counter()
        self.batch_size = batch_size
        self.global_step_count += 1
        if self.global_step_count > self.start_step and self._last is not None:
            self.total_elapsed_time += now - self._last
        self._last = now

    def avg_samples_per_sec(self) -> float:
        """The mean since `start_step`; minus infinity before, as in DeepSpeed."""
        num_steps = self.global_step_count - self.start_step
        if num_steps < 1 or self.total_elapsed_time == 0.0:
            return float("-inf")
        return self.batch_size * num_steps / self.total_elapsed_time
