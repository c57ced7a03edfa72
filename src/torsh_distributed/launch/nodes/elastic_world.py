"""The world of an elastic job, as its leader sees it: turns what workers report into views; says what a change cost."""

from __future__ import annotations

import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial

from torsh_distributed.launch.control.membership import CannotContinue, Membership, MembershipDecision, NewView
from torsh_distributed.launch.control.slot_policy import NodeSlots, SlotChoice, choose_members
from torsh_distributed.launch.control.worker_health import Health, HealthState
from torsh_distributed.launch.local.end_report import EndReport
from torsh_distributed.launch.local.failure_report import LauncherOutput, join_numbers
from torsh_distributed.launch.local.loop import Loop, Timer
from torsh_distributed.launch.nodes.records import AddWorker, ChangeMembers, ForgetWorkers, FromLeader, MemberSaid
from torsh_distributed.launch.spec import ElasticSpec, JobSpec


class ElasticWorld:
    """The membership of one attempt. What it cannot handle goes the way of a job whose world is fixed."""

    def __init__(
        self,
        spec: JobSpec,
        elastic: ElasticSpec,
        attempt: int,
        loop: Loop,
        output: LauncherOutput,
        *,
        tell_all: Callable[[FromLeader], None],
        nodes: Callable[[], Sequence[int]],
        give_up: Callable[[EndReport], None],
        end: Callable[[EndReport], None],
        slots: NodeSlots | None = None,
    ) -> None:
        """`give_up` starts all workers again, if the job may; `end` does not. `slots` limits the workers by node."""
        self._elastic = elastic
        self._attempt = attempt
        self._loop = loop
        self._output = output
        self._tell_all = tell_all
        self._nodes = nodes
        self._give_up = give_up
        self._end_job = end
        self._slots = slots
        self._slots_timer: Timer | None = None
        self._membership = Membership(range(spec.world_size), elastic)
        places = (node for node in range(spec.nnodes) for _ in range(spec.workers_on(node)))
        self._node_of = dict(enumerate(places))
        self.is_over = False
        """Whether the job has gone the way of one whose world is fixed."""
        self._changed_s: float | None = None
        self._started: set[int] = set()
        self._told_to_leave: set[int] = set()
        self._joining: tuple[int, ...] = ()
        self._last_failure: EndReport | None = None
        self._without_gpu: set[int] = set()
        """Nodes that have no sound GPU left for another worker."""
        self._wait_timer: Timer | None = None

    @property
    def members(self) -> list[int]:
        """The workers of the world, in the order of their ranks."""
        return self._membership.members

    @property
    def is_settled(self) -> bool:
        """Whether the world has made a step since its members last changed."""
        return self._changed_s is None and not self.is_over

    @property
    def target(self) -> int:
        """How many workers are wanted."""
        return self._membership.target

    def failed(self, failures: Sequence[EndReport]) -> bool:
        """Workers failed, at the same time; whether the job goes on in place."""
        if self.is_over:
            return False
        now_s = time.monotonic()
        lost = [failure.rank for failure in failures if failure.rank is not None]
        running = set(self._membership.running)
        were_members = {member for member in lost if member in running}
        leaving = self._membership.leaving
        self._last_failure = failures[-1]
        self._without_gpu |= {failure.node_rank for failure in failures if failure.lacks_gpu}
        closed = self._close_slots(failures)
        decisions = self._membership.lost(lost)
        obstacle = next((one.reason for one in decisions if isinstance(one, CannotContinue)), None)
        if obstacle is not None:
            self.is_over = True
            self._output.say(f"not in place: {obstacle}")
            return False
        if were_members and self._changed_s is None:
            self._changed_s = now_s
        num_left = len(self._membership.running)
        for failure in failures:
            rest = "it was about to leave" if failure.rank in leaving else "it had not joined"
            rest = f"{num_left} go{'es' if num_left == 1 else ''} on" if failure.rank in were_members else rest
            if failure.rank in were_members and self._membership.is_short:
                rest = f"{num_left} wait for a {'replacement' if self._slots is None else 'slot'}"
            pid = "" if failure.pid is None else f" (pid {failure.pid})"
            self._output.say(f"worker {failure.rank}{pid} is lost: {failure.cause}; {rest}")
            self._emit("lost", detail=f"worker {failure.rank}: {failure.cause}")
        for text in closed:
            self._output.say(text)
        self._tell_all(ForgetWorkers(attempt=self._attempt, members=tuple(lost)))
        self._carry_out(decisions)
        return True

    def ended(self, member: int) -> None:
        """A worker ended with exit code 0."""
        membership = self._membership
        membership.finished(member)
        strays = tuple(membership.strays)
        if strays and not self.is_over:
            self._output.say(f"worker {join_numbers(strays)} came too late to join: the others have finished")
            self._tell_all(ForgetWorkers(attempt=self._attempt, members=strays))

    def said(self, message: MemberSaid) -> None:
        """A worker tells where it is."""
        if self.is_over:
            return
        membership = self._membership
        match message.what:
            case "ready":
                membership.ready(message.member, message.detail or None)
            case "join":
                self._carry_out(membership.wants_in(message.member))
            case "entered":
                self._carry_out(membership.entered(message.member, message.epoch))
            case "stepped":
                if message.epoch == membership.epoch:
                    self._note_step(message)
            case "stuck":
                self._carry_out(membership.stuck(message.epoch))
            case "scale":
                self._follow_policy(message)
            case "health":
                self._emit("health", detail=f"worker {message.member} is {message.detail}")

    def note_health(self, who: str, health: Health) -> None:
        """How a worker or node is, if that has changed."""
        self._emit("health", detail=f"{who} is {health.state}: {health.reason}")

    def scale(self, target: int) -> str | None:
        """The user wants that many workers; why not, if it cannot be."""
        least, most = self._elastic.min_workers, self._elastic.max_workers
        if not least <= target <= most:
            return f"{target} workers are outside the {least} to {most} that the job may have"
        if self.is_over:
            return "the job is about to end"
        if self._slots is not None:
            return "the workers of this job follow its host discovery script"
        self._carry_out(self._membership.scale(target))
        return None

    def _follow_policy(self, message: MemberSaid) -> None:
        """Rank 0's policy wants so many workers: as many of them as the job allows."""
        if message.member in self._membership.members[:1]:  # else a rank 0 of an older world
            self.follow(message.workers, message.detail)

    def follow(self, workers: int, reason: str) -> None:
        """A policy wants so many workers: as many of them as the job allows; nothing if they are wanted already."""
        membership = self._membership
        target = max(self._elastic.min_workers, min(workers, self._elastic.max_workers))
        if membership.refusal is not None or self.is_over:
            return
        if target != membership.target and self._slots is None:  # a script knows better what there is
            self._output.say(f"{target} workers are wanted now: {reason}")
            self._emit("scaling", detail=f"{membership.target} to {target} workers: {reason}")
            self._carry_out(membership.scale(target))

    def _note_step(self, message: MemberSaid) -> None:
        """The first step of a new world: only now the change is done."""
        if self._changed_s is None:
            return
        cost_ms = (time.monotonic() - self._changed_s) * 1e3
        self._changed_s = None
        num = len(self._membership.members)
        size = f"{num} worker{'' if num == 1 else 's'} from step {message.step}"
        if self._joining:
            noun = "worker" if len(self._joining) == 1 else "workers"
            text = f"{noun} {join_numbers(self._joining)} joined: {size}"
        else:
            text = f"regrouped: {size}"
        self._joining = ()
        text += f", {message.detail}" if message.detail else ""
        self._output.say(f"{text}, cost {cost_ms:.0f} ms")
        self._emit("recovered", detail=f"{text}; cost {cost_ms:.0f} ms")

    def _carry_out(self, decisions: Sequence[MembershipDecision]) -> None:
        for decision in decisions:
            if isinstance(decision, NewView):
                self._change(decision)
            elif isinstance(decision, CannotContinue):
                self._end(decision.reason)
            else:
                for member in decision.members:
                    self._start(member)
        self._limit_wait()

    def _change(self, view: NewView) -> None:
        self._joining = tuple(member for member in view.members if member in self._started)
        self._started -= set(view.members)
        if self._changed_s is None:
            self._changed_s = time.monotonic()
        entering = f"worker {join_numbers(view.members)}: epoch {view.epoch}"
        self._emit("health", detail=f"{HealthState.RECOVERING}: {entering}")
        leaving = [member for member in view.leaving if member not in self._told_to_leave]
        if leaving:
            self._told_to_leave.update(leaving)
            self._output.say(f"worker {join_numbers(leaving)} leaves after this step")
        if view.is_held:
            self._output.say(f"training waits: {self._shortage}")
        self._tell_all(
            ChangeMembers(
                attempt=self._attempt,
                epoch=view.epoch,
                members=view.members,
                is_urgent=view.is_urgent,
                leaving=view.leaving,
                is_held=view.is_held,
            )
        )

    def _start(self, member: int) -> None:
        """Start a worker on the node with the fewest; where slots count, on the one with the most free.

        Not on one without a GPU for it, unless there is no other: that one then says why it cannot.
        """
        num_on = Counter(self._node_of[one] for one in self._on_slots())
        usable = self._usable()
        node = min(self._nodes(), key=lambda one: (one in self._without_gpu, num_on[one] - usable.get(one, 0)))
        self._node_of[member] = node
        self._started.add(member)
        self._tell_all(AddWorker(attempt=self._attempt, member=member, node_rank=node))

    def _limit_wait(self) -> None:
        """While training waits for capacity, it does so for a limited time."""
        if not self._membership.is_short:
            if self._wait_timer is not None:
                self._wait_timer.cancel()
                self._wait_timer = None
        elif self._wait_timer is None:
            limit_s = self._elastic.wait_timeout_s
            reason = f"no replacement joined within {limit_s:g} s"
            end = partial(self._end, reason) if self._slots is None else self._end_for_slots
            self._wait_timer = self._loop.call_later(limit_s, end)

    def _end_for_slots(self) -> None:
        """No restart would help."""
        if not self.is_over:
            why = f"{self._shortage} for {self._elastic.wait_timeout_s:g} s"
            self.is_over = True
            self._end_job(too_few_slots(why, self._last_failure))

    def _end(self, reason: str) -> None:
        if not self.is_over and self._last_failure is not None:
            self.is_over = True
            self._output.say(f"not in place: {reason}")
            self._give_up(self._last_failure)

    def _emit(self, action: str, *, detail: str) -> None:
        # Imported here: it takes a while, and the first worker does not wait for it.
        from torsh_distributed.events import MembershipEvent, emit

        size = len(self._membership.members)
        emit(MembershipEvent(action=action, world_size=size, attempt=self._membership.epoch, detail=detail))

    # Where a host discovery script says how many workers each node takes

    def follow_slots(self) -> None:
        """Other slots, another node or the end of a cooldown: have the workers that the slots are for."""
        if self._slots is None or self.is_over:
            return
        membership, choice = self._membership, self._choose()
        if choice.withdrawn:
            self._output.say(f"worker {join_numbers(choice.withdrawn)} is ended before it joined: its slot is gone")
            membership.withdraw(choice.withdrawn)
            self._tell_all(ForgetWorkers(attempt=self._attempt, members=choice.withdrawn))
        if choice.target != membership.target:
            self._output.say(f"slots for {choice.target} workers, {len(membership.running)} are there")
            self._emit("scaling", detail=f"slots for {choice.target} workers in place of {membership.target}")
        self._carry_out(membership.scale(choice.target, unplaced=choice.unplaced))
        if self._slots_timer is not None:
            self._slots_timer.cancel()
        now_s = time.monotonic()
        next_s = self._slots.failed.next_end_s(now_s)
        if next_s is not None:
            self._slots_timer = self._loop.call_later(next_s - now_s, self.follow_slots)

    def _close_slots(self, failures: Sequence[EndReport]) -> list[str]:
        """Workers failed: their nodes get no new ones for a while, or for good. Says so, if the job goes on."""
        if self._slots is None:
            return []
        guilty = [one.rank for one in failures if one.rank in self._on_slots() and not one.is_consequence]
        now_s = time.monotonic()
        said = []
        for node in sorted({self._node_of[member] for member in guilty if member is not None}):
            delay_s = self._slots.failed.add(node, now_s)
            until = "any more" if delay_s == math.inf else f"for {delay_s:.1f} s"
            said.append(f"node {node} gets no new workers {until}, because one failed there")
        self._membership.target = self._choose(without={one.rank for one in failures}).target
        # Once the loss is dealt with: who has no slot leaves, and a cooldown has its end.
        self._loop.call_later(0, self.follow_slots)
        return said

    def _choose(self, *, without: Collection[int | None] = ()) -> SlotChoice:
        held = self._on_slots(without)
        running = [member for member in self._membership.running if member in held]
        return choose_members(
            self._usable(without),
            self._node_of,
            running=running,
            coming=[member for member in held if member not in running],
            most=self._elastic.max_workers,
        )

    def _on_slots(self, without: Collection[int | None] = ()) -> list[int]:
        """Workers that have a node, without these."""
        there = (*self._membership.running, *self._membership.coming)
        return [member for member in there if member in self._node_of and member not in without]

    def _usable(self, without: Collection[int | None] = ()) -> dict[int, int]:
        if self._slots is None:
            return {}
        num_there = Counter(self._node_of[member] for member in self._on_slots(without))
        return self._slots.usable(self._nodes(), num_there, time.monotonic())

    @property
    def _shortage(self) -> str:
        least = self._elastic.min_workers
        return f"{sum(self._usable().values())} slots for a job of at least {least} workers"

    def members_on(self, node_rank: int) -> list[int]:
        """The running workers of a node."""
        return [member for member in self._membership.running if self._node_of[member] == node_rank]

    def close(self) -> None:
        """The attempt is over."""
        self.is_over = True
        for timer in (self._wait_timer, self._slots_timer):
            if timer is not None:
                timer.cancel()


def too_few_slots(why: str, last: EndReport | None = None) -> EndReport:
    """The end of a job for which a host discovery script offers too little."""
    after = "" if last is None else f"; the last worker that failed: {last.cause}"
    return EndReport(
        node_rank=0,
        node_name=socket.gethostname(),
        cause=f"the host discovery script offers too few slots: {why}{after}",
    )
