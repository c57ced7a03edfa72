"""Makes a running job faster by the advice of `torsh why`: one change at a time, measured, kept or taken back.

All ranks count their updates alike, so they meet at the same ones without asking each other. There rank 0 decides, by
what all ranks have measured, and tells the others; each takes the change before the update that it is about to begin. A
change is tried in turns with the plan as it was, so a machine that becomes slower meanwhile slows both.
"""

from __future__ import annotations

import logging
import os
import resource
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from torsh_distributed import events
from torsh_distributed.comm.collectives.objects import all_gather_object, broadcast_object
from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.observe.bottlenecks.bottleneck import BottleneckType, RunAnalysis
from torsh_distributed.observe.bottlenecks.live_analysis import analyse_live
from torsh_distributed.observe.bottlenecks.median_difference import median_difference, median_of
from torsh_distributed.observe.bottlenecks.recommendation import recommend
from torsh_distributed.observe.job.job_view import JobView
from torsh_distributed.observe.metrics.rank_collector import RankCollector
from torsh_distributed.observe.metrics.rank_reporter import summary_packet
from torsh_distributed.parallel.models.wrapping import repeated_layers
from torsh_distributed.parallel.random_streams import draws_numbers
from torsh_distributed.parallel.torch_internals import _BatchNorm
from torsh_distributed.plan.compatibility.axis_rules import shards_params
from torsh_distributed.plan.running_change import RunningChange
from torsh_distributed.train.job_changes.running_changes import Changeable, change_plan

_log = logging.getLogger(__name__)

SUBJECT = "auto-optimization"
"""Of its events: the audit log."""
_TURNS = 6
"""Of each change: as it was, changed, and so on."""
_SETTLING = 2
"""Updates after a change that do not count."""
_LEAST_GAIN = 0.01
_REST = 20
"""Windows until it looks again, once there is nothing left to try."""


@dataclass(frozen=True)
class LiveAdvice:
    """One piece of advice, and the change of the plan that it means, if a running job can take it."""

    title: str
    reckoning: str
    change: RunningChange | None
    refusal: str = ""
    """Why it is advice only."""


@dataclass(frozen=True)
class OptimizationAttempt:
    """A change that was tried: one line of the audit log."""

    change: str
    reason: str
    step: int
    """The update before which it was decided."""
    before_s: float
    after_s: float
    low_s: float
    high_s: float
    """The seconds that a step has gained, at 95 %."""
    is_kept: bool


@dataclass
class _ChangeOnTrial:
    """A change that is being measured; all ranks have the same."""

    advice: LiveAdvice
    change: RunningChange
    undoing: RunningChange
    turn: int = 0
    rounds: list[list[float]] = field(default_factory=list)


class AutoOptimizationEngine:
    """This rank's part. `before_update` and `update_done` are called on every rank, by the training thread."""

    def __init__(self, *, window: int, allows_lossy: bool) -> None:
        self.attempts: list[OptimizationAttempt] = []
        """What was tried, the oldest first; on all ranks."""
        self.advice_only: dict[str, str] = {}
        """Title to why no running job can do it."""
        self._window = window
        self._allows_lossy = allows_lossy
        self._collector: RankCollector | None = None
        self._waiting: list[LiveAdvice] = []
        self._tried: set[str] = set()
        self._trial: _ChangeOnTrial | None = None
        self._left = _SETTLING
        """Updates until this rank does something again."""
        self._times: list[float] = []
        self._last_s: float | None = None
        self._is_begun = False

    def before_update(self, engine: Changeable) -> None:
        """An update begins: measure the one before; at the end of a window decide with all other ranks."""
        if self._is_begun:
            return  # the same update, once more
        self._is_begun = True
        now_s = time.monotonic()
        if self._last_s is not None:
            self._times.append(now_s - self._last_s)
        self._left -= 1
        if self._left < 0:
            self._end_window(engine)
            now_s = time.monotonic()  # what was decided meanwhile is nobody's step
        self._last_s = now_s

    def update_done(self) -> None:
        """The update is done, or was skipped on all ranks."""
        self._is_begun = False

    def close(self) -> None:
        """Stop looking; what was changed stays."""
        if self._collector is not None:
            self._collector.detach()
            self._collector = None

    def _end_window(self, engine: Changeable) -> None:
        times, self._times = self._times[_SETTLING:], []
        if self._trial is not None:
            self._end_turn(engine, self._trial, times)
        elif self._waiting:
            self._begin(engine, self._waiting.pop(0))
        elif self._collector is None:
            self._collector = RankCollector().attach()
            self._left = self._window + _SETTLING
        else:
            self._look(engine)

    # --- looking -----------------------------------------------------------------------------------------------

    def _look(self, engine: Changeable) -> None:
        """All ranks tell what they have measured; rank 0 says what is worth trying."""
        assert self._collector is not None, "it looks after a window"
        self._collector.fold()
        rank, clock = process_group.rank(), time.time() - time.monotonic()
        packet = summary_packet(self._collector, rank=rank, sequence=1, time=time.time(), clock=clock, facts={})
        self.close()
        told = all_gather_object([packet, _room_bytes()])
        found: list[dict[str, Any]] = []
        if rank == 0:
            view = JobView()
            for one, _ in told:
                view.take(one)
            analysis = analyse_live(view)
            if analysis is not None:
                room = min(free for _, free in told)
                found = [_as_dict(one) for one in self._advice(engine, analysis, room)]
        self._waiting = [_from_dict(one) for one in broadcast_object(found, 0)]
        for one in self._waiting:
            if one.change is None and one.title not in self.advice_only:
                self.advice_only[one.title] = one.refusal
                _tell(f"advice only: {one.title}", f"{one.reckoning}; {one.refusal}")
        self._waiting = [one for one in self._waiting if one.change is not None and str(one.change) not in self._tried]
        self._left = 0 if self._waiting else _REST * self._window

    def _advice(self, engine: Changeable, found: RunAnalysis, room_bytes: float) -> Iterator[LiveAdvice]:
        """What `torsh why` would say, as far as it is about settings; and prefetching, which it cannot know of."""
        plan, model = engine.plan, engine.strategy.unwrapped
        found = replace(found, passes_per_step=float(plan.training.gradient_accumulation))
        for one in recommend(found):
            yield self._judged(engine, one.title, one.reckoning, one.plan_change, room_bytes)
        waits = any(one.kind is BottleneckType.COMMUNICATION for one in found.bottlenecks)
        if waits and shards_params(plan) and not plan.fsdp.forward_prefetch:
            largest = max((_num_bytes(layer) for layer in repeated_layers(model).values()), default=_num_bytes(model))
            change = "[fsdp]\nforward_prefetch = true" if largest <= room_bytes else ""
            told = f"{found.parts['transfer'] * 1e3:.1f} ms a step of transfer, and pieces are gathered when needed"
            yield self._judged(engine, "gather the next piece while one computes", told, change, room_bytes)

    def _judged(self, engine: Changeable, title: str, told: str, plan_change: str, room: float) -> LiveAdvice:
        """The advice, with its change if this job can take it with the losses that it has now."""
        if not plan_change:
            return LiveAdvice(title, told, None, "no setting that changes while a job runs")
        try:
            change = RunningChange.from_dict({"set": tomllib.loads(plan_change)})
            change.applied_to(engine.plan)
        except ConfigurationError as error:
            return LiveAdvice(title, told, None, error.message)
        if change.changes_section("compress") and not self._allows_lossy:
            return LiveAdvice(title, told, None, 'it changes gradients: training.auto_optimize = "lossy" allows it')
        if "training.gradient_accumulation" in change.values:
            refusal = _changes_losses(engine) or _needs_room(room)
            if refusal:
                return LiveAdvice(title, told, None, refusal)
        return LiveAdvice(title, told, change)

    # --- trying ------------------------------------------------------------------------------------------------

    def _begin(self, engine: Changeable, advice: LiveAdvice) -> None:
        assert advice.change is not None, "others are advice only"
        self._tried.add(str(advice.change))
        undoing = RunningChange(values={key: engine.plan.value(key) for key in advice.change.values})
        if undoing.values == advice.change.values:
            self._left = 0
            return
        self._trial = _ChangeOnTrial(advice, advice.change, undoing)
        self._left = self._window + _SETTLING

    def _end_turn(self, engine: Changeable, trial: _ChangeOnTrial, times: list[float]) -> None:
        """Every second turn is one with the change."""
        trial.rounds.append(times)
        trial.turn += 1
        self._left = self._window + _SETTLING
        if trial.turn < _TURNS:
            self._take(engine, trial, trial.change if trial.turn % 2 else trial.undoing)
        else:
            self._decide(engine, trial)

    def _take(self, engine: Changeable, trial: _ChangeOnTrial, change: RunningChange) -> None:
        """Change the plan; a job that cannot refuses on all ranks alike, because all have the same plan."""
        try:
            change_plan(engine, change)
        except ConfigurationError as error:
            self._trial, self._left = None, 0
            self.advice_only[trial.advice.title] = error.message
            _tell(f"advice only: {trial.advice.title}", error.message)

    def _decide(self, engine: Changeable, trial: _ChangeOnTrial) -> None:
        """Rank 0 compares; the change is in place, and is taken back unless it has clearly gained."""
        before, after = trial.rounds[0::2], trial.rounds[1::2]
        verdict: list[float] = []
        if process_group.rank() == 0:
            verdict = [*median_difference(before, after), median_of(before), median_of(after)]
        gain_s, low_s, high_s, before_s, after_s = broadcast_object(verdict, 0)
        is_kept = low_s > 0 and gain_s >= _LEAST_GAIN * before_s
        self._trial, self._left = None, 0
        attempt = OptimizationAttempt(
            change=str(trial.change),
            reason=trial.advice.reckoning,
            step=engine.num_steps,
            before_s=before_s,
            after_s=after_s,
            low_s=low_s,
            high_s=high_s,
            is_kept=is_kept,
        )
        self.attempts.append(attempt)
        _tell(
            f"{'kept' if is_kept else 'taken back'}: {attempt.change}",
            f"{before_s * 1e3:.2f} ms a step as it was, {after_s * 1e3:.2f} ms changed, {low_s * 1e3:+.2f} to"
            f" {high_s * 1e3:+.2f} ms gained at 95 %; tried because of {attempt.reason}",
        )
        if not is_kept:
            change_plan(engine, trial.undoing)


def _tell(choice: str, reason: str) -> None:
    """One line of the audit log, on rank 0."""
    if process_group.rank() == 0:
        events.emit(events.DecisionEvent(subject=SUBJECT, choice=choice, reason=reason))
        _log.info("%s (%s)", choice, reason)


def _changes_losses(engine: Changeable) -> str:
    """Why another number of passes would give other losses; empty if it gives the same."""
    model = engine.strategy.unwrapped
    if any(isinstance(module, _BatchNorm) for module in model.modules()):
        return "statistics of a batch norm are those of a pass, so other passes give other losses"
    if draws_numbers(model):
        return "dropout draws its numbers pass by pass, so other passes give other losses"
    if engine.plan.training.gather_for_loss:
        return "the loss compares the samples of a pass"
    return ""


def _needs_room(room_bytes: float) -> str:
    used = _used_bytes()
    if used <= room_bytes:
        return ""
    return f"a larger pass may need {used / 1e9:.1f} GB more, and {room_bytes / 1e9:.1f} GB are free"


def _used_bytes() -> float:
    """The most that this rank has had: a pass that is twice as large needs at most so much more."""
    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated())
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def _room_bytes() -> float:
    """What is free on this rank's device, or a part of the host's memory that no other rank counts on."""
    if torch.cuda.is_available():
        return float(torch.cuda.get_device_properties(process_group.device()).total_memory) - _used_bytes()
    free = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"))
    return free / process_group.world_size()


def _num_bytes(module: torch.nn.Module) -> float:
    return float(sum(param.nbytes for param in module.parameters()))


def _as_dict(one: LiveAdvice) -> dict[str, Any]:
    return {**asdict(one), "change": None if one.change is None else one.change.to_dict()}


def _from_dict(table: Mapping[str, Any]) -> LiveAdvice:
    change = table["change"]
    return LiveAdvice(
        table["title"],
        table["reckoning"],
        None if change is None else RunningChange.from_dict(change),
        table["refusal"],
    )
