"""Recovery in place: survivors keep their process, regroup, and do the interrupted step again.

Plain data parallelism only: every rank holds the whole state, so nothing is lost with one. A step is done exactly once:

- Until its last collective a step has changed nothing; what a rank has computed of it is given up, and the members of
  the new world divide the same global batch again among themselves.
- A rank that got through the last collective may have updated while another did not. After regrouping the ranks compare
  how far they are, and those behind take the state of the one farthest: its update saw every gradient.

So parameters of two steps never mix, and no rank has to keep a copy of anything.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from torsh_distributed import events
from torsh_distributed.comm.collectives.objects import all_gather_object
from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.comm.collectives.work import Work
from torsh_distributed.comm.groups import process_group
from torsh_distributed.elastic.entering import WorldChanged, enter_newest, news_timeout_s
from torsh_distributed.elastic.epoch_world import EpochWorld
from torsh_distributed.elastic.membership_client import MembershipClient, WorldView, open_membership
from torsh_distributed.elastic.scaling import JobScaler, policy_named
from torsh_distributed.elastic.state_transfer import RankProgress, send_state, source_of
from torsh_distributed.errors import CommunicationError, TorshError
from torsh_distributed.launch.worker.raised_error import is_transport_text
from torsh_distributed.parallel.data.data_strategy import DataParallel
from torsh_distributed.parallel.strategy import PendingNumber
from torsh_distributed.plan import Plan

if TYPE_CHECKING:
    from torsh_distributed.train.engine import Engine

_log = logging.getLogger(__name__)

T = TypeVar("T")

_QUICK_BACKENDS = ("torsh", "shm")


def attach(engine: Engine) -> InPlaceRecovery | None:
    """Let an Engine's steps outlive a lost rank, or tell the launcher why they cannot: then all restart."""
    client = open_membership(process_group.world_size())
    refusal = why_not(engine.plan, engine)
    if refusal is not None:
        client.tell("ready", detail=refusal)
        return None
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
        self._client = client
        self._world = EpochWorld(client.member)
        self._timeout_s = engine.plan.elastic.scaling_timeout_s
        self._loss = 0.0
        self._agreed_epoch = 0
        self._told_epoch = client.current.epoch
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

    def step(self, batch: Any) -> float:
        """One update, done exactly once."""
        self.join()
        started_s = time.monotonic()
        engine, before = self._engine, self._num_updates
        while True:
            try:
                if self._client.is_interrupted:
                    raise WorldChanged
                self._loss = engine.step_once(batch)
                break
            except Exception as error:
                old = self._client.current.members
                self._recover(error)
                is_done = self._num_updates > before
                if process_group.rank() == 0:
                    now = self._client.current.members
                    engine.ledger.report_lost([rank for rank, one in enumerate(old) if one not in now])
                batch = engine.divide_again(batch, is_done=is_done)
                if is_done:
                    break
        self.busy_s += time.monotonic() - started_s
        self._after_step()
        return self._loss

    def protected(self, call: Callable[[], T]) -> T:
        """Run what all ranks do together; again in the new world if one is lost meanwhile."""
        self.join()
        while True:
            try:
                return call()
            except Exception as error:
                self._recover(error)
                self._engine.divide_again(None, is_done=True)

    def mean_loss(self, loss: Tensor) -> PendingNumber:
        """The mean over the ranks, and with it whether all of them know of a view to enter after this step."""
        pending = self._client.pending
        epoch = 0 if pending is None else pending.epoch
        sent = torch.stack([loss.detach().float() / process_group.world_size(), loss.new_tensor(epoch).float()])
        return _MeanAndEpoch(sent, self._note_votes)

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

    def _note_votes(self, loss: float, total: float) -> None:
        self._loss = loss
        pending = self._client.pending
        has_all = pending is not None and total == pending.epoch * process_group.world_size()
        self._agreed_epoch = pending.epoch if pending is not None and has_all else 0

    def _after_step(self) -> None:
        """Report the first step of a world; enter the view that all ranks have agreed on."""
        current = self._client.current
        if self._told_epoch != current.epoch:
            self._told_epoch = current.epoch
            self._client.tell("stepped", epoch=current.epoch, step=self._engine.num_steps)
        pending = self._client.pending
        if pending is None or self._agreed_epoch == 0 or pending.is_urgent or pending.epoch != self._agreed_epoch:
            return
        self._agreed_epoch = 0
        try:
            self._engine.finish_saves()
        except TorshError as error:
            self._recover(error)
        else:
            self._enter_newest()
        self._engine.divide_again(None, is_done=True)

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
        enter_newest(self._client, self._enter, timeout_s=self._timeout_s)

    def _enter(self, view: WorldView) -> None:
        engine, client = self._engine, self._client
        engine.abandon_saves()
        client.call_on_news(self._world.cancel)
        if client.newest.epoch != view.epoch:
            raise WorldChanged
        self._world.enter(view, timeout_s=self._timeout_s)
        events.reached("regroup")
        is_new = client.joins
        mine = -1 if is_new else self._num_updates
        everyone = [RankProgress(num_updates=one) for one in all_gather_object(mine)]
        source = source_of(everyone)
        farthest = everyone[source].num_updates
        if any(one.num_updates != farthest for one in everyone):
            facts = send_state(
                engine,
                source,
                is_needed=mine != farthest,
                is_new=is_new,
                facts={
                    "loss": self._loss,
                    "ledger": engine.ledger.state_dict(),
                    "changes": {} if engine.changes is None else engine.changes.values,
                },
            )
            if is_new:
                engine.ledger.load_state_dict(facts["ledger"])
                if engine.changes is not None:
                    engine.changes.adopt(engine, facts["changes"])
            if mine != farthest:
                self._loss = facts["loss"]
                engine.ledger.commit(engine.num_steps - 1)  # its gradient is in the update that it missed
        assert isinstance(engine.strategy, DataParallel), "checked when this was attached"
        engine.regrouped(engine.strategy.rebuilt())
        client.current, client.joins = view, False
        client.tell("entered", epoch=view.epoch, step=engine.num_steps)

    @property
    def _num_updates(self) -> int:
        return self._engine.num_steps + self._engine.num_skipped


def _is_of_communication(error: Exception) -> bool:
    return isinstance(error, CommunicationError | dist.DistError) or is_transport_text(str(error))


class _MeanAndEpoch(PendingNumber):
    """A sum of two numbers, one of which is the mean loss. Our CPU backends send it when it is waited for."""

    def __init__(self, sent: Tensor, on_votes: Callable[[float, float], None]) -> None:
        self._sent = sent
        self._on_votes = on_votes
        self._work: Work[Tensor] | None = None
        is_late = not sent.is_cuda and process_group.backend() in _QUICK_BACKENDS
        if not is_late and process_group.world_size() > 1:
            self._work = all_reduce(sent, async_op=True)

    @override
    def wait(self) -> float:
        if self._work is not None:
            total = self._work.wait()
        else:
            total = self._sent if process_group.world_size() == 1 else all_reduce(self._sent)
        loss, votes = total.tolist()
        self._on_votes(loss, votes)
        return float(loss)
