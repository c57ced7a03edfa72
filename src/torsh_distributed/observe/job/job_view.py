"""The job as its launcher sees it: every rank's newest summary, the course of the loss, and what happened.

Fed with messages; nothing in it waits, opens or computes for long. Thread-safe: one thread feeds, others look.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torsh_distributed import events
from torsh_distributed.events.recorded import event_of
from torsh_distributed.observe.job.energy_account import EnergyAccount
from torsh_distributed.observe.job.energy_summary import schedule_text
from torsh_distributed.observe.job.federated_account import FederatedAccount
from torsh_distributed.observe.job.rank_risk import RankRisks, RiskScore
from torsh_distributed.observe.job.rank_view import STEPS_KEPT, RankView, Value, ValueKey, finite, newest_of
from torsh_distributed.observe.job.straggler_finder import StragglerFinder
from torsh_distributed.observe.job.training_curve import CurvePoint, EvaluationPoint, LossFall, ThinnedSeries
from torsh_distributed.observe.metrics.catalogue import CATALOGUE, MetricDefinition, MetricScope
from torsh_distributed.observe.metrics.step_record import StepRecord

MAX_RANKS = 8192
MAX_INCIDENTS = 500
STALE_S = 30.0
"""A rank that has been silent for so long has no values any more: old ones would be shown as new."""
_MAX_TEXT_CHARS = 400
Derived = TypeVar("Derived")


@dataclass
class JobHeader:
    """What the job is, and how it is."""

    run_id: str = ""
    command: str = ""
    world_size: int | None = None
    num_workers: int | None = None
    """Ranks of an elastic job now, as its launcher last said; its world has no fixed size."""
    num_nodes: int = 1
    started: float = field(default_factory=time.time)
    ended: float | None = None
    state: str = "starting"
    """starting, running, restarting, finished or failed."""
    attempt: int = 0
    exit_code: int | None = None

    @property
    def trace_id(self) -> str:
        """The trace of the job: 32 hexadecimal digits."""
        return hex_digest(16, self.run_id, self.started)

    def step_span_id(self, rank: int, step: int) -> str:
        """The span of a rank's step in the trace: 16 hexadecimal digits."""
        return hex_digest(8, self.run_id, self.started, self.attempt, rank, step)


def hex_digest(num_bytes: int, *parts: object) -> str:
    """A digest of the parts, in hexadecimal digits."""
    return hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=num_bytes).hexdigest()


class JobView:
    """All that is known about a job. `take` accepts any message; one that is not understood is counted."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.header = JobHeader()
        self.ranks: dict[int, RankView] = {}
        self.curve: ThinnedSeries[CurvePoint] = ThinnedSeries()
        self.loss_fall = LossFall()
        self.evaluations: ThinnedSeries[EvaluationPoint] = ThinnedSeries()
        self.incidents: deque[dict[str, Any]] = deque(maxlen=MAX_INCIDENTS)
        """Rare events, as JSON records with `time`, `type` and `rank`, oldest first."""
        self.stragglers = StragglerFinder()
        self.risks = RankRisks()
        self.energy = EnergyAccount()
        self.federated = FederatedAccount()
        self.num_failures = 0
        self.num_regroupings = 0
        self.newest_step: StepRecord | None = None
        """Of the rank whose steps are the curve."""
        self._has_losses = False
        self._first_rank = MAX_RANKS
        self.is_traced = False
        """Whether steps are exported as spans, so that others may point to them."""
        self.num_dropped = 0
        self._derived: dict[str, tuple[float, float | None, Any]] = {}
        self.num_taken = 0
        """Messages so far, to see whether anything is new."""
        self.step_listeners: list[Callable[[int, StepRecord], None]] = []
        """Called for every new step of a rank, under the lock."""
        self.job_value_sources: list[Callable[[], Mapping[ValueKey, float]]] = []
        """Further values of the job as a whole, such as what fires."""

    def take(self, message: Mapping[str, Any], *, now_s: float | None = None) -> None:
        """Take a message of a rank or of the launcher."""
        with self.lock:
            self.num_taken += 1
            kind = message.get("type")
            if kind == "metrics":
                self._take_summary(message, time.monotonic() if now_s is None else now_s)
            elif kind == "job":
                self._take_header(message)
            elif kind == "membership":
                self._take_membership(message)
            elif kind in ("energy", "carbon", "schedule", "budget", "alert"):
                self._take_energy(message)
            elif kind == "federated_round":
                self._take_round(message)
            else:
                self.num_dropped += 1

    def _take_summary(self, packet: Mapping[str, Any], now_s: float) -> None:
        rank = packet.get("rank")
        limit = min(MAX_RANKS, self.header.world_size or MAX_RANKS)
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < limit:
            self.num_dropped += 1
            return
        view = self.ranks.get(rank)
        if view is None:
            view = self.ranks[rank] = RankView(rank)
        num_bad = view.num_bad
        steps = view.take(packet, now_s=now_s)
        self.num_dropped += view.num_bad - num_bad
        if self.header.state in ("starting", "restarting"):
            self.header.state = "running"
        told = view.facts.get("world_size")
        known = self.header.world_size or self.header.num_workers
        num_ranks = known or (told if isinstance(told, int) else len(self.ranks))
        if self.header.world_size is None and len(self.ranks) > num_ranks > 0:
            # An elastic world became smaller: its last ranks are gone.
            self.ranks = {number: one for number, one in self.ranks.items() if number < num_ranks}
        self._first_rank = min(self._first_rank, rank)
        for step in steps:
            if step.wait_s is not None:
                self.stragglers.add(rank, step.step, step.own_s, num_ranks=num_ranks)
                self._note_risk(self.risks.observe_own_time(rank, step=step.step, time=step.time, own_s=step.own_s))
            self.energy.take_wait(step)
            if rank == self._first_rank:
                self.energy.take_step(step)
                if not step.is_skipped:
                    self._add_to_curve(step)
            for listener in self.step_listeners:
                listener(rank, step)
        for slow in self.stragglers.take_newly_named():
            told = f"it computes {slow.slowdown:.0%} longer than the others since step {slow.since_step}"
            self.incidents.append(
                {
                    "time": time.time(),
                    "type": "straggler",
                    "rank": slow.rank,
                    "step": slow.named_step,
                    "detail": told,
                }
            )
        if "facts" in packet:  # else those that are known are of an earlier summary
            self._take_memory(view)
        marks = packet.get("marks")
        for mark in marks if isinstance(marks, list) else []:
            self._take_mark(rank, mark)

    def _take_memory(self, view: RankView) -> None:
        """What a rank uses of its memory, and could: among its facts, by device."""
        told = view.facts.get("memory")
        if not isinstance(told, Mapping):
            return
        for device in ("host", "device"):
            used, limit = finite(told.get(f"{device}_used")), finite(told.get(f"{device}_limit"))
            if used is not None and limit is not None:
                self.take_sample(
                    events.MemoryEvent(
                        time=view.time,
                        rank=view.rank,
                        device=device,
                        allocated_bytes=int(used),
                        peak_bytes=int(used),
                        limit_bytes=int(limit),
                    )
                )

    def take_sample(self, event: events.Event) -> None:
        """What a rank measured about its memory or its device: trends of it may come before a failure."""
        self._note_risk(self.risks.observe(event))

    def _note_risk(self, alarm: RiskScore | None) -> None:
        if alarm is not None:
            told = f"at risk ({alarm.score:.2f}, {alarm.reason}): {alarm.detail}"
            self.incidents.append({"time": alarm.time, "type": "risk", "rank": alarm.rank, "detail": told})

    def _add_to_curve(self, step: StepRecord) -> None:
        self.newest_step = step
        if step.loss is None and self._has_losses:
            return  # one of the steps that were not looked at
        self._has_losses = step.loss is not None
        if step.loss is not None:
            self.loss_fall.add(step.loss)
        rate = step.num_samples / step.step_s if step.num_samples is not None and step.step_s > 0 else None
        self.curve.add(
            CurvePoint(step.step, step.time, step.loss, step.step_s, rate, step.grad_norm, step.learning_rate)
        )

    def _take_mark(self, rank: int, mark: Any) -> None:
        if not isinstance(mark, Mapping):
            self.num_dropped += 1
            return
        record = {
            str(name)[:60]: value[:_MAX_TEXT_CHARS] if isinstance(value, str) else value
            for name, value in list(mark.items())[:20]
            if value is None or isinstance(value, str | int | bool) or finite(value) is not None
        }
        if isinstance(record.get("type"), str) and isinstance(record.get("time"), int | float):
            record["rank"] = rank
            self.incidents.append(record)
            if record["type"] == "evaluation" and rank == self._first_rank:  # all ranks report the same
                self._add_evaluation(record)

    def _add_evaluation(self, record: Mapping[str, Any]) -> None:
        step, moment, loss = (finite(record.get(name)) for name in ("step", "time", "loss"))
        if step is not None and moment is not None and loss is not None:
            self.evaluations.add(EvaluationPoint(int(step), moment, loss))

    def _take_energy(self, message: Mapping[str, Any]) -> None:
        event = event_of(message)
        if isinstance(event, events.EnergyEvent):
            self.energy.take_energy(event)
        elif isinstance(event, events.CarbonEvent):
            self.energy.take_carbon(event)
        elif isinstance(event, events.ScheduleEvent):
            self.energy.take_schedule(event)
            self.incidents.append({**events.to_record(event), "rank": -1, "detail": schedule_text(event)})
        elif isinstance(event, events.BudgetEvent):
            self.energy.take_budget(event)
        elif isinstance(event, events.AlertEvent):
            self.incidents.append(events.to_record(event))
        else:
            self.num_dropped += 1

    def _take_round(self, message: Mapping[str, Any]) -> None:
        event = event_of(message)
        if not isinstance(event, events.FederatedRoundEvent):
            self.num_dropped += 1
            return
        self.federated.take(event)
        if event.num_planned is not None and event.round + 1 >= event.num_planned:
            self.header.state, self.header.ended = "finished", event.time
        elif self.header.state == "starting":
            self.header.state = "running"

    def _take_header(self, message: Mapping[str, Any]) -> None:
        for name in ("run_id", "command"):
            if isinstance(message.get(name), str):
                setattr(self.header, name, message[name][:_MAX_TEXT_CHARS])
        for name in ("world_size", "num_nodes"):
            if isinstance(message.get(name), int):
                setattr(self.header, name, message[name])

    def _take_membership(self, message: Mapping[str, Any]) -> None:
        action = str(message.get("action", ""))[:60]
        header = self.header
        if isinstance(message.get("attempt"), int):
            header.attempt = message["attempt"]
        if header.world_size is None and isinstance(message.get("world_size"), int):
            self._take_size(message["world_size"])
        self.num_regroupings += action == "recovered"
        if action in ("started", "restarted"):
            header.state = "starting" if action == "started" else "restarting"
            self.risks.keep_below(0)  # other processes
            for view in self.ranks.values():
                view.timeline, view.timelines = [], {}
        elif action == "lost":
            self.num_failures += 1
            self.energy.take_failure(finite(message.get("time")) or time.time())
        elif action == "ended":
            code = message.get("exit_code")
            header.exit_code = code if isinstance(code, int) else None
            header.state = "finished" if header.exit_code == 0 else "failed"
            header.ended = time.time()
        detail = message.get("detail")
        self.incidents.append(
            {
                "time": time.time(),
                "type": "membership",
                "rank": -1,
                "action": action,
                "detail": detail[:_MAX_TEXT_CHARS] if isinstance(detail, str) else None,
            }
        )

    def _take_size(self, num_workers: int) -> None:
        """An elastic world has so many ranks now: the numbers above it are nobody's."""
        self.header.num_workers = num_workers
        self.risks.keep_below(num_workers)
        self.ranks = {number: one for number, one in self.ranks.items() if number < num_workers}

    # Looking

    def derived(self, name: str, make: Callable[[JobView], Derived], *, max_age_s: float) -> Derived:
        """What `make` computes from the view, at most that old: for what is dear, and shown every second."""
        known = self._derived.get(name)
        # A view that has ended, or is read from files, does not wait for the next look.
        if known is None or time.monotonic() - known[0] >= max_age_s or self.header.ended != known[1]:
            self._derived[name] = known = (time.monotonic(), self.header.ended, make(self))
        made: Derived = known[2]
        return made

    def definitions(self) -> dict[str, MetricDefinition]:
        """Every metric that a value may have, custom ones too."""
        with self.lock:
            found = dict(CATALOGUE)
            for view in self.ranks.values():
                found.update(view.custom)
            return found

    def values(self, names: Container[str] | None = None) -> Iterator[tuple[RankView, ValueKey, Value]]:
        """Every value of every rank that is not silent, or those of some metrics; hold the lock while iterating.

        A job that has ended keeps its last values.
        """
        now_s = time.monotonic()
        for _, view in sorted(self.ranks.items()):
            if self.header.ended is None and now_s - view.heard_s > STALE_S:
                continue
            for key, value in view.values(names):
                yield view, key, value

    def _num_reporting(self) -> int:
        now_s = time.monotonic()
        return sum(self.header.ended is not None or now_s - one.heard_s <= STALE_S for one in self.ranks.values())

    def series(self, name: str, *labels: str) -> dict[int, float]:
        """The newest value of a metric by rank, of those that have one."""
        with self.lock:
            found = {rank: view.number(name, *labels) for rank, view in self.ranks.items()}
        return {rank: value for rank, value in found.items() if value is not None}

    @property
    def total_steps(self) -> int | None:
        """How many steps the job has to do, if a rank has told."""
        told = (view.facts.get("total_steps") for view in self.ranks.values())
        return next((count for count in told if isinstance(count, int) and count > 0), None)

    @property
    def remaining_s(self) -> float | None:
        """Seconds to the last step at the pace of the newest ones, with all that happened between them.

        None in a job that has ended, or whose number of steps no rank has told.
        """
        rank, newest, total = self.ranks.get(self._first_rank), self.newest_step, self.total_steps
        if rank is None or newest is None or total is None or self.header.ended is not None:
            return None
        steps = newest_of(rank.steps, min(len(rank.steps) - 1, STEPS_KEPT))  # the first has the start-up in it
        if not steps:
            return None
        return max(0, total - newest.step) * math.fsum(step.step_s for step in steps) / len(steps)

    def job_values(self) -> dict[ValueKey, float]:
        """The metrics of the job as a whole."""
        with self.lock:
            values: dict[ValueKey, float] = {
                ("torsh_ranks", ()): self._num_reporting(),
                ("torsh_restarts", ()): self.header.attempt,
                ("torsh_failures", ()): self.num_failures,
                ("torsh_regroupings", ()): self.num_regroupings,
                ("torsh_packets_dropped", ()): self.num_dropped,
            }
            size = self.header.world_size or self.header.num_workers
            if size is not None:
                values["torsh_world_size", ()] = size
            for name, known in (
                ("torsh_planned_steps", self.total_steps),
                ("torsh_remaining_seconds", self.remaining_s),
                ("torsh_loss_regained_ratio", self.loss_fall.regained_share),
            ):
                if known is not None:
                    values[name, ()] = known
            for found in self.stragglers.stragglers:
                values["torsh_straggler", (str(found.rank),)] = 1
            values.update(self.federated.values())
        values.update(energy_values(self))
        for source in self.job_value_sources:
            values.update(source())
        return values


def energy_values(view: JobView) -> dict[ValueKey, float]:
    """What the job has spent, as metrics; nothing where no meter is read."""
    with view.lock:
        found = view.energy.summary(total_steps=view.total_steps)
    if found is None:
        return {}
    values: dict[ValueKey, float | None] = {
        ("torsh_energy_joules", ("measured",)): found.measured_j,
        ("torsh_energy_joules", ("estimated",)): found.estimated_j,
        ("torsh_power_watts", ()): math.fsum(row.newest_w for row in found.meters),
        ("torsh_idle_watts", ()): found.idle_w,
        ("torsh_joules_per_step", ()): found.joules_per_step,
        ("torsh_joules_per_sample", ()): found.joules_per_sample,
        ("torsh_wasted_joules", ("failures",)): found.failures_j,
        ("torsh_wasted_joules", ("undone",)): found.undone_j,
        ("torsh_wasted_joules", ("skipped",)): found.skipped_j,
        ("torsh_wasted_joules", ("waiting",)): found.waiting_j,
        ("torsh_predicted_joules", ()): found.predicted_j,
        ("torsh_co2_grams", ()): found.grams,
        ("torsh_held_joules", ()): found.held_j,
        ("torsh_holding", ()): None if view.energy.schedule is None else float(view.energy.schedule.workers == 0),
        **{("torsh_budget_ratio", (one.name,)): one.spent / one.limit for one in view.energy.budgets.values()},
        ("torsh_carbon_intensity", ()): None if view.energy.carbon is None else view.energy.carbon.g_per_kwh,
    }
    return {key: value for key, value in values.items() if value is not None}


def is_of_node(definition: MetricDefinition) -> bool:
    """Whether a value belongs to the node of the rank that told it."""
    return definition.scope is MetricScope.NODE
