"""What an engine tells while it trains: progress lines, times, events for monitors, the profile of one step."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from torch import nn

from torsh_distributed.migrate.deepspeed.observing.deepspeed_timers import SynchronizedWallClockTimer, ThroughputTimer
from torsh_distributed.migrate.deepspeed.observing.flops_profile import FlopsProfiler
from torsh_distributed.migrate.deepspeed.observing.run_monitors import MonitorEvent, MonitorMaster
from torsh_distributed.migrate.deepspeed.training.run_settings import RunSettings

_log = logging.getLogger(__name__)

_TIMERS = {"forward": "fwd", "backward": "bwd", "step": "step"}
_EVENTS = {"fwd": "forward", "bwd": "backward", "step": "step"}


class ReportedEngine(Protocol):
    """What a report needs of an engine."""

    global_steps: int
    global_samples: int
    skipped_steps: int

    def get_lr(self) -> list[float]:
        """The learning rates."""

    def get_mom(self) -> list[Any]:
        """The momenta."""

    def fp16_enabled(self) -> bool:
        """Whether there is a loss scale."""

    @property
    def cur_scale(self) -> float:
        """The loss scale."""


class EngineReport:
    """Follows one engine."""

    def __init__(self, settings: RunSettings, module: nn.Module, *, rank: int, num_ranks: int) -> None:
        self._settings, self._rank = settings, rank
        self.monitors = MonitorMaster(settings.config, rank=rank)
        self.timers = SynchronizedWallClockTimer()
        self.throughput = ThroughputTimer(settings.batch.train)
        self._profiles = bool(settings.value("flops_profiler.enabled", False))
        self._is_timed = bool(settings.value("wall_clock_breakdown", False)) or self._profiles
        self.profile_step = int(settings.value("flops_profiler.profile_step", 1)) if self._profiles else -1
        factor = float(settings.value("flops_profiler.recompute_fwd_factor", 0.0))
        self.profiler = FlopsProfiler(module, recompute_fwd_factor=factor) if self._profiles and rank == 0 else None
        self._has_profiled = False

    def timing(self, part: str, *, is_profiled: bool = False) -> AbstractContextManager[None]:
        """Around a part of a step: timed if the config asks for it, profiled in one step."""
        if not self._is_timed:
            return nullcontext()
        return self._measured(part, is_profiled=is_profiled)

    @contextmanager
    def _measured(self, part: str, *, is_profiled: bool) -> Iterator[None]:
        timer = self.timers(_TIMERS[part])
        profiler = self.profiler if is_profiled and not self._has_profiled else None
        timer.start()
        if profiler is not None:
            profiler.start_profile()
        try:
            yield
        finally:
            if profiler is not None:
                profiler.stop_profile()
                self._has_profiled = True
            timer.stop()

    def after_step(self, engine: ReportedEngine, *, is_boundary: bool) -> None:
        """A microbatch is done; with `is_boundary` an update too."""
        if not is_boundary:
            return
        self.throughput.count(self._settings.batch.train)
        every = self._settings.value("steps_per_print")
        if self._rank == 0 and every and engine.global_steps % int(every) == 0:
            _log.info(
                "step=%d, skipped=%d, lr=%s, mom=%s",
                engine.global_steps,
                engine.skipped_steps,
                engine.get_lr(),
                engine.get_mom(),
            )
        if self.monitors.enabled:
            self.monitors.write_events(self._events(engine))
        if self._has_profiled and self.profiler is not None and self.profiler.started:
            self._print_profile(engine.global_steps)
        if self._is_timed and self._rank == 0:
            self.timers.log(list(_TIMERS.values()))

    def _events(self, engine: ReportedEngine) -> Iterator[MonitorEvent]:
        rates = engine.get_lr()
        if rates:
            yield "Train/Samples/lr", rates[0], engine.global_samples
        if engine.fp16_enabled():
            yield "Train/Samples/loss_scale", engine.cur_scale, engine.global_samples
        if self._is_timed:
            for name, part in _EVENTS.items():
                yield (
                    f"Train/Samples/elapsed_time_ms_{part}",
                    self.timers(name).elapsed(reset=False),
                    engine.global_samples,
                )

    def _print_profile(self, step: int) -> None:
        assert self.profiler is not None, "asked for before"
        value = self._settings.value
        self.profiler.print_model_profile(
            profile_step=step,
            module_depth=int(value("flops_profiler.module_depth", -1)),
            top_modules=int(value("flops_profiler.top_modules", 1)),
            detailed=bool(value("flops_profiler.detailed", True)),
            output_file=value("flops_profiler.output_file"),
        )
        self.profiler.end_profile()

    def close(self) -> None:
        """Stop measuring."""
        if self.profiler is not None:
            self.profiler.stop_profile()
