"""The leader: takes the reports of all nodes, asks the coordinator what to do, and tells every node."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

from torsh_distributed.launch.causes.diagnosis import Diagnosis
from torsh_distributed.launch.causes.inquiry import Inquiry
from torsh_distributed.launch.control.plan_changes import ChangeWord, PlanChanges
from torsh_distributed.launch.control.slot_policy import NodeSlots
from torsh_distributed.launch.control.worker_health import Health
from torsh_distributed.launch.local.end_report import EndReport
from torsh_distributed.launch.local.exit_causes import peek_status
from torsh_distributed.launch.local.failure_report import LauncherOutput, join_numbers
from torsh_distributed.launch.local.loop import Loop, Timer
from torsh_distributed.launch.nodes.coordinator import Coordinator, Decision, JobPhase, StartAttempt
from torsh_distributed.launch.nodes.elastic_leader import ElasticLeader, too_few_slots
from torsh_distributed.launch.nodes.listening_sockets import listen_in_range, listen_on, listen_on_path
from torsh_distributed.launch.nodes.records import (
    AddWorker,
    Ask,
    ChangeMembers,
    ChangePlan,
    ChangeSaid,
    ChangeWanted,
    DiagnosisWanted,
    End,
    Ended,
    Failed,
    Finished,
    FromLeader,
    FromNode,
    Interrupted,
    Measured,
    MemberSaid,
    Said,
    Start,
    Stop,
    Stopped,
)
from torsh_distributed.launch.nodes.store_process import StoreProcess
from torsh_distributed.launch.spec import JobSpec


class Leader:
    """Runs on node 0. Every attempt gets an empty store, so its workers meet no key of an earlier one."""

    def __init__(self, spec: JobSpec, loop: Loop, output: LauncherOutput, *, token: str, directory: Path) -> None:
        """`directory` is private to this user; the store's Unix socket for the workers of this node is in it."""
        self._spec = spec
        self._loop = loop
        self._output = output
        self._token = token
        self._directory = directory
        self._inquiry: Inquiry | None = None
        self._elastic: ElasticLeader | None = None
        self._offered: dict[int, int] | None = None
        """Slots by node rank, where a host discovery script says them."""
        if spec.elastic is not None and spec.elastic.discovery is not None:
            self._offered = {node: spec.workers_on(node) for node in range(spec.nnodes)}
        self._slots: NodeSlots | None = None
        self._late_start: StartAttempt | None = None
        self._late_timer: Timer | None = None
        self._changes: PlanChanges | None = None
        self._start: Start | None = None
        """That of the running attempt, for nodes that join it."""
        self._store: StoreProcess | None = None
        self._listener: socket.socket | None = None
        self._local_listener: socket.socket | None = None
        self._send: dict[int, Callable[[FromLeader], None]] = {}
        self.coordinator = Coordinator(num_nodes=spec.nnodes, max_restarts=spec.max_restarts)
        self.on_measured: Callable[[Measured], None] = _drop
        """Takes what the workers of other nodes measure."""

    def join(self, node_rank: int, send: Callable[[FromLeader], None]) -> None:
        """Add a node that fits the job; `send` carries decisions to it. The last one starts the job.

        One that a host discovery script names later joins the running attempt, without workers at first.
        """
        self._send[node_rank] = send
        decisions = self.coordinator.joined(node_rank)
        self._carry_out(decisions)
        if not decisions and self._start is not None and self._elastic is not None:
            counts = self._start.workers_by_node
            more = (0,) * max(0, node_rank + 1 - len(counts))
            send(dataclasses.replace(self._start, workers_by_node=(*counts, *more)))
            self._elastic.follow_slots()

    def receive(self, node_rank: int, message: FromNode) -> None:
        """Handle a report of a node."""
        match message:
            case Failed():
                if not self._goes_on_in_place(message.attempt, [message.failure]):
                    self._inquire(message.attempt, lambda inquiry: inquiry.failed(message.failure))
            case MemberSaid():
                if self._elastic is not None and message.attempt == self.coordinator.attempt:
                    self._elastic.said(message)
            case Ended():
                if self._elastic is not None and message.worker.rank is not None:
                    self._elastic.ended(message.worker.rank)
                if self._elastic is None or self._elastic.is_over:
                    self._inquire(message.attempt, lambda inquiry: inquiry.ended(message.worker))
            case Said():
                self._inquire(message.attempt, lambda inquiry: inquiry.said(message.status, is_asked=message.is_asked))
            case Finished():
                self._carry_out(self.coordinator.finished(node_rank, message.attempt))
            case Stopped():
                self._carry_out(self.coordinator.stopped(node_rank, message.attempt))
            case Measured():
                self.on_measured(message)
            case ChangeWanted():
                if self._changes is not None and self.coordinator.phase is JobPhase.RUNNING:
                    self._changes.want(message.change, message.reason)
            case ChangeSaid():
                if self._changes is not None and message.attempt == self.coordinator.attempt:
                    word = ChangeWord(message.number, message.what, message.at, message.step, message.detail)
                    self._changes.said(message.member, word)
            case DiagnosisWanted():
                self.diagnose(lambda found: self._output.show_diagnosis(found.lines))
            case Interrupted():
                self._carry_out(self.coordinator.interrupted(message.signal))

    def _inquire(self, attempt: int, tell: Callable[[Inquiry], None]) -> None:
        """Tell the inquiry into the running attempt; what comes from an earlier one is of no interest any more."""
        coordinator = self.coordinator
        if self._inquiry is not None and coordinator.phase is JobPhase.RUNNING and coordinator.attempt == attempt:
            tell(self._inquiry)

    def diagnose(self, tell: Callable[[Diagnosis], None]) -> None:
        """Ask all ranks what they do, and tell what that means."""
        if self._inquiry is None:
            tell(Diagnosis(is_stuck=False, text="The job has not started: not all nodes have joined."))
        else:
            self._inquiry.diagnose(tell)

    # An elastic job

    def _goes_on_in_place(self, attempt: int, failures: list[EndReport]) -> bool:
        """Whether the running attempt goes on without these workers."""
        coordinator = self.coordinator
        if self._elastic is None or coordinator.phase is not JobPhase.RUNNING or coordinator.attempt != attempt:
            return False
        return self._elastic.failed(failures)

    def _begin_elastic(self, attempt: int) -> None:
        if self._elastic is not None:
            self._elastic.close()
        elastic = self._spec.elastic
        if elastic is None:
            return
        cooldown_s = None if elastic.discovery is None else elastic.discovery.cooldown_s
        self._slots = None if self._offered is None else NodeSlots(self._offered, cooldown_s)
        self._elastic = ElasticLeader(
            self._spec,
            elastic,
            attempt,
            self._loop,
            self._output,
            tell_all=self._tell_all,
            nodes=lambda: list(self._send),
            give_up=lambda failure: self._carry_out(self.coordinator.failed(attempt, failure)),
            end=lambda failure: self._carry_out(self.coordinator.lost(failure)),
            slots=self._slots,
        )

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
        elif self._elastic is not None:
            self._elastic.follow_slots()

    def _has_slots(self) -> bool:
        """Whether all workers can be started again."""
        elastic = self._spec.elastic
        return self._offered is None or elastic is None or sum(self._offered.values()) >= elastic.min_workers

    def _delay(self, start: StartAttempt) -> None:
        """Start all workers once there are slots for enough of them."""
        elastic = self._spec.elastic
        assert elastic is not None, "only an elastic job has slots"
        assert self._offered is not None, "only slots can be too few"
        few = f"{sum(self._offered.values())} slots for a job of at least {elastic.min_workers} workers"
        self._output.say(f"the restart waits: {few}")
        self._late_start = start
        why = f"{few} for {elastic.wait_timeout_s:g} s"
        self._late_timer = self._loop.call_later(elastic.wait_timeout_s, lambda: self._end_late(why))

    def _end_late(self, why: str) -> None:
        if self._late_start is not None:
            self._carry_out(self.coordinator.lost(too_few_slots(why)))

    def _counts(self) -> tuple[int, ...]:
        """Workers with which each node starts, where slots say so: all of them, up to the most that the job allows."""
        elastic = self._spec.elastic
        if self._offered is None or elastic is None:
            return ()
        left, counts = elastic.max_workers, []
        for node in range(max(self._send) + 1):
            counts.append(min(left, self._offered.get(node, 0)) if node in self._send else 0)
            left -= counts[-1]
        return tuple(counts)

    def _begin_changes(self, attempt: int) -> None:
        if self._changes is not None:
            self._changes.close()
        elastic = self._elastic
        self._changes = PlanChanges(
            self._loop,
            self._output,
            ranks=lambda: range(self._spec.world_size) if elastic is None else elastic.members,
            is_settled=lambda: elastic is None or elastic.is_settled,
            tell=lambda told: self._tell_all(ChangePlan(attempt=attempt, **told)),
        )

    def scale(self, target: object) -> dict[str, Any]:
        """Change the number of workers, and say what is done about it."""
        if not isinstance(target, int) or self._elastic is None:
            return {"is_done": False, "text": "this job was not started with --elastic: its workers stay the same"}
        if self.coordinator.phase is not JobPhase.RUNNING:
            return {"is_done": False, "text": f"the job is {self.coordinator.phase}"}
        problem = self._elastic.scale(target)
        return {"is_done": problem is None, "text": problem or f"{target} workers are wanted now"}

    def scale_by(self, change: int) -> None:
        """The user's signal: as many workers more, or fewer."""
        if self._elastic is not None:
            answer = self.scale(self._elastic.target + change)
            self._output.say(str(answer["text"]))

    def _begin_inquiry(self, attempt: int) -> None:
        if self._inquiry is not None:
            self._inquiry.close()
        self._inquiry = Inquiry(
            self._loop,
            self._spec.world_size,
            ask=lambda: self._tell_all(Ask(attempt=attempt)),
            on_verdict=lambda failure: self._carry_out(self.coordinator.failed(attempt, failure)),
            on_notice=lambda found: self._output.show_wait(found.text, stack=found.stack, likely=found.likely or ""),
        )

    def lose(self, failure: EndReport) -> None:
        """A node is lost."""
        if failure.node_rank != 0:
            self._send.pop(failure.node_rank, None)
            if self._outlives(failure):
                return
        self._carry_out(self.coordinator.lost(failure))

    def note_health(self, node_rank: int, health: Health) -> None:
        """A node falls silent, or is heard again."""
        if self._elastic is not None:
            self._elastic.note_health(f"node {node_rank}", health)

    def _outlives(self, failure: EndReport) -> bool:
        """Whether an elastic job goes on without a node that is lost: its workers are, all at once."""
        if self._elastic is None:
            return False
        members = self._elastic.members_on(failure.node_rank)
        if not members and self._offered is not None:
            # Its workers had left, or it was not given any.
            self._output.say(f"node {failure.node_rank} ({failure.node_name}) is gone, which had no workers")
            self._elastic.follow_slots()
            self._carry_out(self.coordinator.dropped(failure.node_rank))
            return True
        cause = f"node {failure.node_rank}: {failure.cause}"
        lost = [dataclasses.replace(failure, rank=member, cause=cause) for member in members]
        if not lost or not self._goes_on_in_place(self.coordinator.attempt, lost):
            return False
        self._carry_out(self.coordinator.dropped(failure.node_rank))
        return True

    def _carry_out(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case StartAttempt() if decision.attempt and not self._has_slots():
                    self._delay(decision)
                    continue
                case StartAttempt():
                    counts = self._counts()
                    if counts:
                        self._spec = dataclasses.replace(self._spec, nnodes=len(counts), workers_by_node=counts)
                    self._begin_inquiry(decision.attempt)
                    self._begin_elastic(decision.attempt)
                    self._begin_changes(decision.attempt)
                    self._start = self._open(decision.attempt)
                    message: FromLeader = self._start
                case Stop():
                    message = decision
                    limit_s = self._spec.shutdown_timeout_s + self._spec.heartbeat_timeout_s
                    self._loop.call_later(limit_s, partial(self._check_stopped, decision.attempt, limit_s))
                case End():
                    message = decision
            if not isinstance(decision, StartAttempt):
                self._start = None
            if not isinstance(decision, StartAttempt) and self._inquiry is not None:
                self._inquiry.close()
            if not isinstance(decision, StartAttempt) and self._elastic is not None:
                self._elastic.close()
            if not isinstance(decision, StartAttempt) and self._changes is not None:
                self._changes.close()
            self._tell_all(message)

    def _tell_all(self, message: FromLeader) -> None:
        if isinstance(message, AddWorker):
            self.coordinator.resumed(message.node_rank)
        if isinstance(message, ChangeMembers) and self._changes is not None:
            self._changes.cancel("the members of the world change")
        for send in list(self._send.values()):
            send(message)

    def _check_stopped(self, attempt: int, limit_s: float) -> None:
        coordinator = self.coordinator
        if coordinator.phase is JobPhase.STOPPING and coordinator.attempt == attempt:
            cause = f"node {join_numbers(coordinator.unstopped)} did not end its workers within {limit_s:g} s"
            self.lose(EndReport(node_rank=coordinator.unstopped[0], node_name="", cause=cause))

    def _open(self, attempt: int) -> Start:
        """An empty store for the attempt, on a port of its own or on the one the user chose."""
        address = self._spec.master_addr
        port = 0 if self._spec.spans_nodes else self._spec.master_port or 0
        serves_torch = self._spec.serves_torch_store
        if port and serves_torch and self._store is not None:
            # The next attempt has the same port: torch's old store must not answer its workers.
            self._close_store()
        if self._listener is None or not port:
            self._close_listeners()
            self._listener = self._listen(address, port)
        if self._store is None:
            self._store = StoreProcess(self._token, tls=self._spec.tls)
            self._loop.watch(self._store.pidfd, self._lose_store)
            self._loop.watch(self._store.reports.fileno(), self._show_report)
        path = ""
        if serves_torch:
            self._store.serve_torch(self._listener)
        else:
            path = str(self._directory / f"store-{attempt}")
            self._close_local_listener()
            self._local_listener = listen_on_path(path)
            self._store.serve([self._listener, *filter(None, [self._local_listener])])
        return Start(
            attempt=attempt,
            master_addr=address,
            master_port=self._listener.getsockname()[1],
            local_store=path if self._local_listener is not None else "",
            machine_interval_s=self._spec.observe.machine_interval_s if self._spec.observe.is_active else None,
            workers_by_node=self._spec.workers_by_node,
        )

    def _listen(self, address: str, port: int) -> socket.socket:
        ports = self._spec.port_range
        if port or ports is None:
            return listen_on(address, port)
        return listen_in_range(address, ports, besides=self._spec.meeting_port if self._spec.spans_nodes else 0)

    def _show_report(self) -> None:
        """The store refused connections, and says so in one line."""
        assert self._store is not None, "only a store that was started reports"
        line = self._store.take_report()
        if line:
            self._output.warn(f"the workers' store: {line}")
        else:
            self._loop.unwatch(self._store.reports.fileno())

    def _lose_store(self) -> None:
        """The store's process ended: no worker can meet the others."""
        assert self._store is not None, "only a store that was started can end"
        status = peek_status(self._store.pidfd)
        if status is None:
            return
        self._loop.unwatch(self._store.pidfd)
        cause = f"the process of the workers' store (pid {self._store.pid}) ended: {status.describe()}"
        self.lose(EndReport(node_rank=0, node_name=socket.gethostname(), cause=cause))

    def _close_listeners(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._close_local_listener()

    def _close_local_listener(self) -> None:
        if self._local_listener is not None:
            self._local_listener.close()
            self._local_listener = None

    def _close_store(self) -> None:
        if self._store is not None:
            self._loop.unwatch(self._store.pidfd)
            self._loop.unwatch(self._store.reports.fileno())
            self._store.close()
            self._store = None

    def close(self) -> None:
        """End the store and the inquiry."""
        if self._inquiry is not None:
            self._inquiry.close()
        self._close_listeners()
        self._close_store()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _drop(message: Measured) -> None:
    """Nobody looks."""
