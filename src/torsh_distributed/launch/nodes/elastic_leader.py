"""The leader of an elastic job, whose workers come and go while it runs.

Every attempt has an `ElasticWorld`, which decides first; what it cannot handle goes the way of a job whose workers stay
the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from torsh_distributed.launch.control.slot_policy import NodeSlots
from torsh_distributed.launch.control.worker_health import Health
from torsh_distributed.launch.local.end_report import EndReport
from torsh_distributed.launch.local.failure_report import LauncherOutput
from torsh_distributed.launch.local.loop import Loop, Timer
from torsh_distributed.launch.nodes.coordinator import Decision, JobPhase, StartAttempt
from torsh_distributed.launch.nodes.elastic_world import ElasticWorld, too_few_slots
from torsh_distributed.launch.nodes.leader import Leader
from torsh_distributed.launch.nodes.records import (
    AddWorker,
    ChangeMembers,
    Ended,
    Failed,
    FromLeader,
    FromNode,
    MemberSaid,
    Start,
    WorkersWanted,
)
from torsh_distributed.launch.spec import ElasticSpec, JobSpec


class ElasticLeader(Leader):
    """Lets the running attempt go on without lost workers, and with others."""

    def __init__(
        self,
        spec: JobSpec,
        elastic: ElasticSpec,
        loop: Loop,
        output: LauncherOutput,
        *,
        token: str,
        directory: Path,
    ) -> None:
        super().__init__(spec, loop, output, token=token, directory=directory)
        self.elastic = elastic
        self._world: ElasticWorld | None = None
        """That of the last attempt; None until the first one starts."""
        self._start: Start | None = None
        """That of the running attempt, for nodes that join it."""
        self._offered: dict[int, int] | None = None
        """Slots by node rank, where a host discovery script says them."""
        if elastic.discovery is not None:
            self._offered = {node: spec.workers_on(node) for node in range(spec.nnodes)}
        self._slots: NodeSlots | None = None
        self._late_start: StartAttempt | None = None
        self._late_timer: Timer | None = None

    @override
    def join(self, node_rank: int, send: Callable[[FromLeader], None]) -> None:
        """One that a host discovery script names later joins the running attempt, without workers at first."""
        start = self._start
        super().join(node_rank, send)
        if start is not None and self._world is not None:
            counts = start.workers_by_node
            more = (0,) * max(0, node_rank + 1 - len(counts))
            send(dataclasses.replace(start, workers_by_node=(*counts, *more)))
            self._world.follow_slots()

    @override
    def receive(self, node_rank: int, message: FromNode) -> None:
        world = self._world
        if world is not None:
            match message:
                case Failed() if self._goes_on(message.attempt, [message.failure]):
                    return
                case MemberSaid():
                    if message.attempt == self.coordinator.attempt:
                        world.said(message)
                    return
                case Ended():
                    if message.worker.rank is not None:
                        world.ended(message.worker.rank)
                    # While the world may still change, a worker that ended well explains nothing.
                    if not world.is_over:
                        return
        super().receive(node_rank, message)

    def _goes_on(self, attempt: int, failures: list[EndReport]) -> bool:
        """Whether the running attempt goes on in place, without these workers."""
        coordinator = self.coordinator
        if self._world is None or coordinator.phase is not JobPhase.RUNNING or coordinator.attempt != attempt:
            return False
        return self._world.failed(failures)

    @override
    def lose(self, failure: EndReport) -> None:
        if failure.node_rank == 0 or self._world is None or not self._outlives(self._world, failure):
            super().lose(failure)

    def _outlives(self, world: ElasticWorld, failure: EndReport) -> bool:
        """Whether the job goes on without a node that is lost: its workers are, all at once."""
        self._send.pop(failure.node_rank, None)  # first: its workers are replaced on the other nodes
        members = world.members_on(failure.node_rank)
        if not members and self._offered is not None:
            # Its workers had left, or it was not given any.
            self._output.say(f"node {failure.node_rank} ({failure.node_name}) is gone, which had no workers")
            world.follow_slots()
            self._carry_out(self.coordinator.dropped(failure.node_rank))
            return True
        cause = f"node {failure.node_rank}: {failure.cause}"
        lost = [dataclasses.replace(failure, rank=member, cause=cause) for member in members]
        if not lost or not self._goes_on(self.coordinator.attempt, lost):
            return False
        self._carry_out(self.coordinator.dropped(failure.node_rank))
        return True

    @override
    def note_health(self, node_rank: int, health: Health) -> None:
        if self._world is not None:
            self._world.note_health(f"node {node_rank}", health)

    @override
    def scale(self, target: object) -> dict[str, Any]:
        if self._world is None or self.coordinator.phase is not JobPhase.RUNNING:
            return {"is_done": False, "text": f"the job is {self.coordinator.phase}"}
        problem = self._world.scale(target) if isinstance(target, int) else "give a number of workers"
        return {"is_done": problem is None, "text": problem or f"{target} workers are wanted now"}

    @override
    def scale_by(self, change: int) -> None:
        if self._world is not None:
            answer = self.scale(self._world.target + change)
            self._output.say(str(answer["text"]))

    @override
    def _follow_energy(self, message: WorkersWanted) -> None:
        super()._follow_energy(message)
        if self._world is not None and message.workers:
            self._world.follow(message.workers, message.reason)

    @override
    def _ranks(self) -> Sequence[int]:
        return () if self._world is None else self._world.members

    @override
    def _is_settled(self) -> bool:
        return self._world is not None and self._world.is_settled

    @override
    def _carry_out(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, StartAttempt) and decision.attempt and not self._has_slots():
                self._delay(decision)
            else:
                super()._carry_out([decision])

    @override
    def _begin(self, attempt: int) -> Start:
        counts = self._counts()
        if counts:
            self._spec = dataclasses.replace(self._spec, nnodes=len(counts), workers_by_node=counts)
        if self._world is not None:
            self._world.close()
        cooldown_s = None if self.elastic.discovery is None else self.elastic.discovery.cooldown_s
        self._slots = None if self._offered is None else NodeSlots(self._offered, cooldown_s)
        self._world = ElasticWorld(
            self._spec,
            self.elastic,
            attempt,
            self._loop,
            self._output,
            tell_all=self._tell_all,
            nodes=lambda: list(self._send),
            give_up=lambda failure: self._carry_out(self.coordinator.failed(attempt, failure)),
            end=lambda failure: self._carry_out(self.coordinator.lost(failure)),
            slots=self._slots,
        )
        self._start = super()._begin(attempt)
        return self._start

    @override
    def _end_attempt(self) -> None:
        super()._end_attempt()
        self._start = None
        if self._world is not None:
            self._world.close()

    @override
    def _tell_all(self, message: FromLeader) -> None:
        if isinstance(message, AddWorker):
            self.coordinator.resumed(message.node_rank)
        if isinstance(message, ChangeMembers) and self._changes is not None:
            # Ranks that hold come to the end of a step and meet in the new world; the policy holds them again there.
            self._changes.release()
            self._changes.cancel("the members of the world change")
        super()._tell_all(message)

    # Where a host discovery script says how many workers each node takes

    def offer(self, slots: Mapping[int, int]) -> None:
        """A host discovery script says how many workers each node takes; a node that it does not name takes none."""
        assert self._offered is not None, "asked for in a job with a script alone"
        self._offered = dict(slots)
        if self._slots is not None:
            self._slots.offered = self._offered
        if self._late_start is not None and self._has_slots():
            start, self._late_start = self._late_start, None
            if self._late_timer is not None:
                self._late_timer.cancel()
            self._carry_out([start])
        elif self._world is not None:
            self._world.follow_slots()

    def _has_slots(self) -> bool:
        """Whether all workers can be started again."""
        return self._offered is None or sum(self._offered.values()) >= self.elastic.min_workers

    def _delay(self, start: StartAttempt) -> None:
        """Start all workers once there are slots for enough of them."""
        assert self._offered is not None, "only slots can be too few"
        few = f"{sum(self._offered.values())} slots for a job of at least {self.elastic.min_workers} workers"
        self._output.say(f"the restart waits: {few}")
        self._late_start = start
        why = f"{few} for {self.elastic.wait_timeout_s:g} s"
        self._late_timer = self._loop.call_later(self.elastic.wait_timeout_s, lambda: self._end_late(why))

    def _end_late(self, why: str) -> None:
        if self._late_start is not None:
            self._carry_out(self.coordinator.lost(too_few_slots(why)))

    def _counts(self) -> tuple[int, ...]:
        """Workers with which each node starts, where slots say so: all of them, up to the most that the job allows."""
        if self._offered is None:
            return ()
        left, counts = self.elastic.max_workers, []
        for node in range(max(self._send) + 1):
            counts.append(min(left, self._offered.get(node, 0)) if node in self._send else 0)
            left -= counts[-1]
        return tuple(counts)
