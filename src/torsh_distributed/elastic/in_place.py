"""Recovery in place: survivors keep their process, regroup, and finish the interrupted step.

Plain data parallelism only: every rank holds the whole state, so nothing is lost with one. A step is done exactly once:

- Until its last collective a step has changed nothing. If every survivor still has its gradients, they keep them,
  compute what the lost rank had of the batch, and average again. If an average was torn, or no gradient was computed
  yet, they divide the same global batch again among themselves and do the step again.
- A rank that got through the last collective may have updated while another did not. After regrouping the ranks compare
  how far they are, and those behind take the state of the one farthest: its update saw every gradient.

So parameters of two steps never mix, and no rank has to keep a copy of anything while nothing fails.

Threads: all of this runs on the thread that trains. The line's thread takes views (`MembershipClient`), and after an
urgent one releases whatever the training thread waits in: that raises, and the view is there when `_recover` looks. If
the collective failed by itself, `_recover` waits for the view. One that is not urgent is entered after the step in
which all ranks voted for it. The scaling thread reads numbers and asks for workers; it changes nothing here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from torsh_distributed import events
from torsh_distributed.comm.agreement import require_as_on, require_same
from torsh_distributed.comm.collectives.call import resolve_group
from torsh_distributed.comm.collectives.objects import all_gather_object
from torsh_distributed.comm.groups import process_group
from torsh_distributed.comm.shared_memory.buffers import shares_memory
from torsh_distributed.elastic.entering import WorldChanged, enter_newest, news_timeout_s
from torsh_distributed.elastic.epoch_world import EpochWorld, MeanAndVotes, is_unanimous
from torsh_distributed.elastic.membership_client import MembershipClient, WorldView, open_membership
from torsh_distributed.elastic.scaling import JobScaler, policy_named
from torsh_distributed.elastic.state_stream import (
    StateSender,
    StreamChannel,
    is_streamed,
    receive_state,
    state_sum,
)
from torsh_distributed.elastic.state_transfer import RankProgress, send_rest, send_state, source_of, sources_of
from torsh_distributed.errors import CommunicationError, TorshError
from torsh_distributed.launch.worker.raised_error import is_transport_text
from torsh_distributed.parallel.data.data_strategy import DataParallel
from torsh_distributed.parallel.strategy import PendingNumber
from torsh_distributed.plan import Plan
from torsh_distributed.train.job_changes.elastic_steps import SAME_SETTINGS_HINT
from torsh_distributed.train.job_changes.step_in_progress import InterruptedStep, StepInProgress

if TYPE_CHECKING:
    from torsh_distributed.train.engine import Engine

_log = logging.getLogger(__name__)

T = TypeVar("T")


def attach(engine: Engine) -> InPlaceRecovery | None:
    """Let an Engine's steps outlive a lost rank, or tell the launcher why they cannot: then all restart."""
    client = open_membership(process_group.world_size())
    refusal = why_not(engine.plan, engine)
    if refusal is not None:
        client.tell("ready", detail=refusal)
        return None
    assert isinstance(engine.strategy, DataParallel), "others are refused"
    engine.strategy.keep_failed_gradients()
    recovery = InPlaceRecovery(engine, client)
    client.tell("ready")
    elastic = engine.plan.elastic
    if elastic.scaling != "reactive":
        JobScaler(recovery, policy_named(elastic.scaling)).start(every_s=elastic.scaling_interval_s)
    return recovery


def why_not(plan: Plan, engine: Engine) -> str | None:
    """Why an Engine cannot go on in place; None if it can."""
    if plan.elastic.mode != "in_place":
        return f"elastic.mode is {plan.elastic.mode}"
    if type(engine.strategy) is not DataParallel:
        return f"the plan splits the model ({type(engine.strategy).__name__}): a lost rank takes a part of it along"
    if engine.strategy.compressor is not None:
        return f"compress.method is {plan.compress.method}: its state differs from rank to rank"
    if plan.offload.enabled:
        return "offload.enabled: its state is in files and memory of its own"
    if plan.ddp.auto_size:
        return "ddp.auto_size: a rank that joins has measured other buckets"
    return None


class InPlaceRecovery:
    """The steps of one Engine in a world whose members change."""

    def __init__(self, engine: Engine, client: MembershipClient) -> None:
        self._engine = engine
        self._in_progress = StepInProgress(engine)
        self._client = client
        self._world = EpochWorld(client.member)
        self._timeout_s = engine.plan.elastic.scaling_timeout_s
        self._loss = 0.0
        self._agreed_epoch = 0
        self._told_epoch = client.current.epoch
        self._kept: InterruptedStep | None = None
        self._sources: dict[int, int] | None = None
        self._has_agreed = client.joins
        """Whether the first world has compared its settings; one that joins compares its own when it enters."""
        self._source_settings: tuple[int, dict[str, Any]] = (0, {})
        """In one that joins: the rank whose state it took, and what that was started with."""
        self._numbers = client.current.members
        """Members in the order of their numbers in the ledger's last batch."""
        self._how = ""
        self._senders: dict[int, list[StateSender]] = {}
        """Of a view that this rank's world is about to enter: streams to those that join."""
        self.busy_s = 0.0
        """Time that this rank has spent in steps."""

    # What the Engine calls

    @property
    def is_joining(self) -> bool:
        """Whether this worker was started later and has not entered the running world yet."""
        return self._client.joins

    def join(self) -> None:
        """In a worker that was started later: enter the running world."""
        if self._client.joins:
            self._client.tell("join")
            self._enter_newest()
            source, theirs = self._source_settings
            require_as_on(
                source,
                theirs,
                self._engine.settings,
                own_rank=process_group.rank(),
                what="the settings of one that joins",
                hint=SAME_SETTINGS_HINT,
            )

    def step(self, batch: Any) -> float:
        """One update, done exactly once."""
        self.join()
        started_s = time.monotonic()
        engine, before = self._engine, self._num_updates
        numbers, attempt = self._client.current.members, partial(engine.step_once, batch)
        # Where others keep their gradients, a rank that has not begun yet computes its own before it regroups.
        world = dist.group.WORLD
        keeps = world is not None and world.size() > 1 and shares_memory(world)
        while True:
            try:
                if self._client.is_interrupted and not keeps:
                    raise WorldChanged
                self._agree()
                self._loss = attempt()
                break
            except Exception as error:
                keeps = False
                # Before the old world is left: its groups own the memory of the buckets. `_even_out` tells the others.
                self._kept = self._in_progress.keep()
                self._recover(error)
                kept, self._kept = self._kept, None
                # All ranks are equally far now, so all of them take the same branch below: this rank did the update
                # before it heard of the loss, or has taken the state of one that did.
                is_done = self._num_updates > before
                now = self._client.current.members
                if process_group.rank() == 0:
                    committed = enumerate(numbers if is_done else self._numbers)
                    engine.ledger.report_lost([number for number, one in committed if one not in now])
                if is_done:
                    self._note("the update was done")
                    self._in_progress.divide_next()
                    break
                if kept is not None and self._sources is not None:  # None on all ranks if one of them kept nothing
                    left = [number for number, one in enumerate(numbers) if one in now]
                    attempt = partial(self._finish, kept, left, self._sources)
                    self._note("gradients kept")
                else:
                    attempt = partial(engine.step_once, self._in_progress.divide_again(batch))
                    numbers = now
                    self._note("step done again")
        self._numbers = numbers
        self.busy_s += time.monotonic() - started_s
        self._after_step()
        return self._loss

    def _agree(self) -> None:
        """Before the first step of the first world: refuse ranks that differ. A world that is entered has done so."""
        if not self._has_agreed and process_group.world_size() > 1:
            require_same(self._engine.settings, group=resolve_group(None), hint=SAME_SETTINGS_HINT)
        self._has_agreed = True

    def _finish(self, kept: InterruptedStep, members: list[int], sources: dict[int, int]) -> float:
        """Finish the interrupted step from what the survivors have; the next one is divided among them."""
        loss = self._in_progress.finish(kept, members=members, sources=sources)
        self._in_progress.divide_next()
        return loss

    def _note(self, how: str) -> None:
        """How the interrupted step is finished."""
        self._how = how
        view = self._client.current
        detail = f"step {self._engine.num_steps}: {how}"
        events.emit(
            events.MembershipEvent(action="continued", world_size=len(view.members), attempt=view.epoch, detail=detail)
        )

    def protected(self, call: Callable[[], T]) -> T:
        """Run what all ranks do together; again in the new world if one is lost meanwhile."""
        self.join()
        while True:
            try:
                return call()
            except Exception as error:
                self._recover(error)
                self._in_progress.divide_next()

    def mean_loss(self, loss: Tensor) -> PendingNumber:
        """The mean over the ranks, and with it whether all of them know of a view to enter after this step."""
        pending = self._client.pending
        epoch = 0 if pending is None or not self._is_ready_for(pending) else pending.epoch
        return MeanAndVotes(loss, epoch, self._note_votes)

    # What decides on the number of workers

    @property
    def is_leading(self) -> bool:
        """Whether this worker is rank 0 of the present world."""
        return not self._client.joins and self._client.current.members[:1] == (self._client.member,)

    @property
    def num_workers(self) -> int:
        """Members of the present world."""
        return len(self._client.current.members)

    @property
    def num_steps(self) -> int:
        """Updates done."""
        return self._engine.num_steps

    def ask_for(self, num_workers: int, reason: str) -> None:
        """Ask the launcher for that many workers, within the job's limits."""
        self._client.tell("scale", workers=num_workers, detail=reason)

    # Between two steps

    def _note_votes(self, loss: float, votes: Sequence[float]) -> None:
        self._loss = loss
        pending = self._client.pending
        has_all = pending is not None and is_unanimous(votes, pending.epoch, process_group.world_size())
        self._agreed_epoch = pending.epoch if pending is not None and has_all else 0

    def _after_step(self) -> None:
        """Report the first step of a world; enter the view that all ranks have agreed on."""
        current = self._client.current
        if self._told_epoch != current.epoch:
            self._told_epoch = current.epoch
            self._client.tell("stepped", epoch=current.epoch, step=self._engine.num_steps, detail=self._how)
        self._how = ""
        pending = self._client.pending
        if pending is not None and pending.epoch not in self._senders:
            self._start_streams(pending)
        if pending is None or self._agreed_epoch == 0 or pending.is_urgent or pending.epoch != self._agreed_epoch:
            return
        self._agreed_epoch = 0
        # Every rank is here after the same step: the votes came with its loss. The joiners get what this step changed
        # before anybody enters; and saves end first, because they use the groups that are left.
        try:
            for sender in self._senders.get(pending.epoch, ()):
                sender.finish()
            self._engine.finish_saves()
        except TorshError as error:
            self._recover(error)
        else:
            self._enter_newest()
        self._in_progress.divide_next()

    def _is_ready_for(self, pending: WorldView) -> bool:
        """Whether this rank agrees to enter a view: the source of the state, once its streams are nearly done."""
        if pending.is_urgent or not self._joiners_of(pending):
            return True
        senders = self._senders.get(pending.epoch)
        return senders is not None and all(sender.is_nearly_done for sender in senders)

    def _joiners_of(self, view: WorldView) -> list[int]:
        """Those that get their state from this rank while the others train."""
        current = self._client.current.members
        if not self.is_leading or not is_streamed(self._engine):
            return []
        return [member for member in view.members if member not in current]

    def _start_streams(self, pending: WorldView) -> None:
        """Between two steps: begin to send the state to those that join."""
        self._drop_streams()
        if not pending.is_urgent:
            self._senders[pending.epoch] = [
                StateSender(self._engine, epoch=pending.epoch, member=member, timeout_s=self._timeout_s)
                for member in self._joiners_of(pending)
            ]

    def _drop_streams(self) -> None:
        for sender in [one for senders in self._senders.values() for one in senders]:
            sender.abort()
        self._senders = {}

    def _receive(self, view: WorldView) -> bool:
        """In a worker that joins between two steps: get the state while the others train; whether it has it."""
        if view.is_urgent or not is_streamed(self._engine):
            return False
        try:
            with StreamChannel(
                epoch=view.epoch, member=self._client.member, is_source=False, timeout_s=self._timeout_s
            ) as channel:
                self._client.call_on_news(channel.abort)
                if self._client.newest.epoch != view.epoch:
                    raise WorldChanged
                channel.connect()
                return receive_state(self._engine, channel)
        except (TorshError, RuntimeError) as error:
            if self._client.newest.epoch != view.epoch:
                raise WorldChanged from error
            _log.warning("the state comes when this worker enters: %s", error)
            return False

    # From one world to the next

    def _recover(self, error: Exception) -> None:
        """Go on in a new world if `error` comes of a lost rank; otherwise raise it."""
        if not self._client.is_interrupted:
            if not _is_of_communication(error):
                raise error
            if self._client.await_view(news_timeout_s(), is_wanted=lambda view: view.is_urgent) is None:
                raise error
        self._enter_newest()

    def _enter_newest(self) -> None:
        # Where too few workers are left, the launcher says how long training may wait for more.
        enter_newest(self._client, self._enter, timeout_s=max(self._timeout_s, news_timeout_s()))

    def _enter(self, view: WorldView) -> None:
        engine, client = self._engine, self._client
        # Saves go on in the background, together with ranks that may be gone.
        self._in_progress.abandon_saves()
        self._drop_streams()
        # One that joins gets the state while the others train. News cancels that, and then the coming up of the world.
        has_state = not client.joins or self._receive(view)
        client.call_on_news(self._world.cancel)
        self._world.enter(view, is_newest=lambda: client.newest.epoch == view.epoch, timeout_s=self._timeout_s)
        events.reached("regroup")
        self._even_out(has_state=has_state)
        assert isinstance(engine.strategy, DataParallel), "checked when this was attached"
        self._in_progress.regrouped(engine.strategy.rebuilt())
        # Last: until now the view is pending, and `enter_newest` would try it or a newer one again.
        client.current, client.joins = view, False
        client.tell("entered", epoch=view.epoch, step=engine.num_steps)

    def _even_out(self, *, has_state: bool) -> None:
        """In the new world: compare how far all are, and send the state to those that need it."""
        engine, is_new = self._engine, self._client.joins
        mine = self._num_updates if has_state else -1
        kept = None if self._kept is None else sorted(self._kept.averaged)
        # All that follows is decided from this, so every rank decides the same and joins the same collectives.
        told = all_gather_object([mine, kept, is_new, engine.settings])
        everyone = [RankProgress(num_updates=one[0], averaged=one[1], is_new=one[2]) for one in told]
        self._sources = sources_of(everyone)
        source = source_of(everyone)
        self._has_agreed, self._source_settings = True, (source, told[source][3])
        farthest = everyone[source].num_updates
        is_even = all(one.num_updates == farthest for one in everyone)
        if is_even and not any(one.is_new for one in everyone):
            return
        facts: dict[str, Any] = {
            "loss": self._loss,
            "ledger": engine.ledger.state_dict(),
            "changes": {} if engine.changes is None else engine.changes.values,
        }
        # Updates that were done again by a joiner gave the same bits; if not, it takes the whole state.
        if is_even and len({tuple(one) for one in all_gather_object(state_sum(engine))}) == 1:
            facts = send_rest(engine, source, is_new=is_new, facts=facts)
            self._how = "its state came while the others trained"
        else:
            is_needed = is_new or mine != farthest
            facts = send_state(engine, source, is_needed=is_needed, is_new=is_new, facts=facts)
            self._how = "its state came while all waited" if any(one.is_new for one in everyone) else ""
        if is_new:
            engine.ledger.load_state_dict(facts["ledger"])
            if engine.changes is not None:
                engine.changes.adopt(engine, facts["changes"])
        elif mine != farthest:
            engine.ledger.commit(engine.num_steps - 1)  # its gradient is in the update that it missed
        if is_new or mine != farthest:
            self._loss = facts["loss"]

    @property
    def _num_updates(self) -> int:
        return self._engine.num_steps + self._engine.num_skipped


def _is_of_communication(error: Exception) -> bool:
    return isinstance(error, CommunicationError | dist.DistError) or is_transport_text(str(error))
