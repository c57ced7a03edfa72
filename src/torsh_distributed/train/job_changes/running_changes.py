"""Changes of the plan while an Engine runs: all ranks take one before the same update, agreed over the control plane.

Nothing is sent through the training group, and a job that changes nothing pays for one look at a lock for each update.
The launcher asks every rank where it could stop. A rank answers with the number of the update that it has yet to begin,
and does not begin that one before it hears again, which takes a round trip. The largest number is then the update
before which all ranks change: none has begun it, and all learn of it before they could.

A change may be a hold: all ranks stop before that update, where no collective is pending, until the launcher releases
them or the hold is over by itself.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torsh_distributed import events
from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import ConfigurationError, OperationTimeout, TorshError
from torsh_distributed.parallel.strategy import Strategy
from torsh_distributed.plan import Plan
from torsh_distributed.plan.running_change import RunningChange
from torsh_distributed.train.learning_rate import LearningRate
from torsh_distributed.upward import LAUNCHER_LINE

if TYPE_CHECKING:
    from torsh_distributed.train.checkpointing import EngineCheckpoints

_KIND = "change"
_WAIT_S = 120.0


class ChangeLine(Protocol):
    """What of a worker's line to its launcher is used here."""

    def send(self, message: dict[str, Any]) -> bool:
        """Tell the launcher."""

    def listen(self, kind: str, handler: Callable[[dict[str, Any]], None]) -> None:
        """Hear the launcher."""


class Changeable(Protocol):
    """What of an Engine changes, or decides on whether it can."""

    strategy: Strategy
    plan: Plan
    learning_rate: LearningRate
    num_steps: int
    elastic: Any

    @property
    def checkpoints(self) -> EngineCheckpoints:
        """When it saves."""


@dataclass(frozen=True)
class _AgreedChange:
    """A change that all ranks take before update number `at` of this world."""

    number: int
    at: int
    change: RunningChange
    reason: str


class RunningChanges:
    """This rank's part. `before_update` and `update_done` are called by the training thread, `hear` by the line's."""

    def __init__(self, line: ChangeLine) -> None:
        self.values: dict[str, Any] = {}
        """What has changed since the job began, by key."""
        self._line = line
        self._news = threading.Condition()
        self._next = 0
        self._is_begun = False
        self._asked: int | None = None
        self._agreed: list[_AgreedChange] = []
        self._released = 0
        """Number of the last change whose hold is over: one that is agreed on and not reached yet may be among them."""
        line.listen(_KIND, self.hear)

    def before_update(self, engine: Changeable) -> None:
        """An update begins: wait if the launcher has asked where to stop, and take what is due."""
        with self._news:
            if self._is_begun:
                return  # the same update, once more
            if self._asked is not None and not self._news.wait_for(lambda: self._asked is None, _WAIT_S):
                raise OperationTimeout(
                    f"the launcher asked for a change of the plan and was silent for {_WAIT_S:g} s after that",
                    hint="is the process of `torsh run` stopped?",
                    operation="change the plan",
                )
            due = [one for one in self._agreed if one.at <= self._next]
            self._agreed = [one for one in self._agreed if one.at > self._next]
            self._is_begun = True
            self._next += 1
        for one in due:
            self._take(engine, one)
            self._hold(one)

    def _hold(self, one: _AgreedChange) -> None:
        """Wait here as a hold says. A new world, or the end of the job, begins with a release."""
        until_s = time.monotonic() + one.change.hold_s
        with self._news:
            while self._released < one.number and (left_s := until_s - time.monotonic()) > 0:
                self._news.wait(min(left_s, threading.TIMEOUT_MAX))

    def update_done(self) -> None:
        """The update is done, or was skipped on all ranks."""
        self._is_begun = False

    def world_changed(self, engine: Changeable) -> None:
        """Every rank of a new world begins to count again, with all that was agreed on before it was announced."""
        with self._news:
            due, self._agreed = self._agreed, []
            self._asked, self._next, self._is_begun = None, 0, False
            self._news.notify_all()
        for one in due:
            self._take(engine, one)

    def adopt(self, engine: Changeable, values: Mapping[str, Any]) -> None:
        """In a rank that joins: what has changed before it came."""
        if values:
            engine.plan = RunningChange(values=values).applied_to(engine.plan)
            self.values = dict(values)

    def hear(self, message: dict[str, Any]) -> None:
        """On the line's thread: a word of the launcher."""
        number, what = int(message["number"]), message["what"]
        with self._news:
            if what == "release":
                self._released = max(self._released, number)
                self._news.notify_all()
            elif what == "prepare":
                self._asked = number
                at = max([self._next, *(one.at for one in self._agreed)])
            elif self._asked == number:
                if what == "commit":
                    change = RunningChange.from_dict(message["change"])
                    self._agreed.append(_AgreedChange(number, int(message["at"]), change, str(message["reason"])))
                self._asked = None
                self._news.notify_all()
        if what == "prepare":
            self._tell(number, "ready", at=at)

    def _take(self, engine: Changeable, one: _AgreedChange) -> None:
        """Change the plan, or say why not: on all ranks alike, because all have the same plan."""
        try:
            change_plan(engine, one.change)
        except ConfigurationError as error:
            choice, what = f"unchanged: {error.message}", "refused"
        else:
            self.values |= one.change.values
            choice, what = str(one.change), "changed"
        if process_group.rank() == 0:
            events.emit(events.DecisionEvent(subject="plan", choice=choice, reason=one.reason))
        self._tell(one.number, what, step=engine.num_steps, detail=choice)

    def _tell(self, number: int, what: str, **facts: Any) -> None:
        self._line.send({"type": _KIND, "what": what, "number": number, **facts})


def change_plan(engine: Changeable, change: RunningChange) -> None:
    """Change the plan of an Engine between two updates; every rank calls this with the same change.

    Raises ConfigurationError, with nothing changed, if this Engine cannot take it.
    """
    plan = change.applied_to(engine.plan)
    if change.values:
        plan.validate(process_group.world_size())
    _refuse(engine, change)
    try:
        if change.changes_section("compress"):
            engine.strategy.use_compression(plan.compress)
        if change.changes_section("ddp"):
            engine.strategy.use_buckets(plan.ddp)
        if change.changes_section("fsdp"):
            engine.strategy.use_prefetch(plan.fsdp)
    except TorshError as error:  # a model or strategy that cannot
        raise ConfigurationError(error.message, hint=error.hint, key=next(iter(change.values))) from error
    engine.plan = plan
    engine.learning_rate.multiply(change.learning_rate_factor)
    if change.changes_section("checkpoint"):
        engine.checkpoints.use_intervals(every_steps=plan.checkpoint.every_steps, every_s=plan.checkpoint.every_s)
    if change.save_checkpoint or (change.hold_s and engine.plan.checkpoint.enabled and engine.num_steps):
        engine.checkpoints.save(wait=change.hold_s > 0)  # a hold may end with the job


def _refuse(engine: Changeable, change: RunningChange) -> None:
    saves = change.save_checkpoint or change.changes_section("checkpoint")
    if saves and not engine.plan.checkpoint.enabled:
        raise ConfigurationError(
            "checkpoint.enabled is off: there is no directory that this job saves to", hint="turn it on in the plan"
        )
    if "training.gradient_accumulation" in change.values and (
        engine.plan.recovery.out_of_memory == "smaller_microbatch"
    ):
        raise ConfigurationError(
            "recovery.out_of_memory = smaller_microbatch decides on the number of passes by itself",
            hint="leave training.gradient_accumulation to it",
        )
    if change.changes_section("compress") and engine.elastic is not None:
        raise ConfigurationError(
            "an elastic job that goes on in place sends gradients as they are: a compressor's state differs from rank "
            "to rank",
            hint='set elastic.mode = "restart" to compress',
        )


def running_changes() -> RunningChanges | None:
    """What takes changes of the launcher in this process; None without our launcher.

    The launcher's line is looked up by name: it belongs to a package beside this one, and is there if a launcher is.
    """
    module: Any = sys.modules.get(LAUNCHER_LINE)
    line = None if module is None else module.open_line()
    return None if line is None else RunningChanges(line)
