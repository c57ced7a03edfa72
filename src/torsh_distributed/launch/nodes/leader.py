"""The leader: takes the reports of all nodes, asks the coordinator what to do, and tells every node.

`Leader` is that of a job whose workers stay the same; `elastic_leader` has the one whose workers come and go. All of it
runs on the launcher's loop, in one thread: a method sees no report arrive while it runs.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from torsh_distributed.launch.causes.diagnosis import Diagnosis
from torsh_distributed.launch.causes.inquiry import Inquiry
from torsh_distributed.launch.control.plan_changes import ChangeWord, PlanChanges
from torsh_distributed.launch.control.worker_health import Health
from torsh_distributed.launch.local.end_report import EndReport
from torsh_distributed.launch.local.exit_causes import peek_status
from torsh_distributed.launch.local.failure_report import LauncherOutput, join_numbers
from torsh_distributed.launch.local.loop import Loop
from torsh_distributed.launch.nodes.coordinator import Coordinator, Decision, JobPhase, StartAttempt
from torsh_distributed.launch.nodes.listening_sockets import listen_in_range, listen_on, listen_on_path
from torsh_distributed.launch.nodes.records import (
    Ask,
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
    Said,
    Start,
    Stop,
    Stopped,
    Unable,
    WorkersWanted,
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
        self._changes: PlanChanges | None = None
        self._store: StoreProcess | None = None
        self._listener: socket.socket | None = None
        self._local_listener: socket.socket | None = None
        self._send: dict[int, Callable[[FromLeader], None]] = {}
        self.coordinator = Coordinator(num_nodes=spec.nnodes, max_restarts=spec.max_restarts)
        self.on_measured: Callable[[Measured], None] = _drop
        """Takes what the workers of other nodes measure."""

    def join(self, node_rank: int, send: Callable[[FromLeader], None]) -> None:
        """Add a node that fits the job; `send` carries decisions to it. The last one starts the job."""
        self._send[node_rank] = send
        self._carry_out(self.coordinator.joined(node_rank))

    def receive(self, node_rank: int, message: FromNode) -> None:
        """Handle a report of a node."""
        match message:
            case Failed():
                self._inquire(message.attempt, lambda inquiry: inquiry.failed(message.failure))
            case Ended():
                self._inquire(message.attempt, lambda inquiry: inquiry.ended(message.worker))
            case Said():
                self._inquire(message.attempt, lambda inquiry: inquiry.said(message.status, is_asked=message.is_asked))
            case Finished():
                self._carry_out(self.coordinator.finished(node_rank, message.attempt))
            case Stopped():
                self._carry_out(self.coordinator.stopped(node_rank, message.attempt))
            case Unable() if message.attempt == self.coordinator.attempt:
                self._carry_out(self.coordinator.lost(message.failure))
            case Measured():
                self.on_measured(message)
            case ChangeWanted():
                if self._changes is not None and self.coordinator.phase is JobPhase.RUNNING:
                    self._changes.want(message.change, message.reason)
            case ChangeSaid():
                if self._changes is not None and message.attempt == self.coordinator.attempt:
                    word = ChangeWord(message.number, message.what, message.at, message.step, message.detail)
                    self._changes.said(message.member, word)
            case WorkersWanted() if node_rank == 0 and self.coordinator.phase is JobPhase.RUNNING:
                self._follow_energy(message)
            case DiagnosisWanted():
                self.diagnose(lambda found: self._output.show_diagnosis(found.lines))
            case Interrupted():
                self._carry_out(self.coordinator.interrupted(message.signal))

    def _follow_energy(self, message: WorkersWanted) -> None:
        """The policy on energy decides, with every reading of its meters: hold, or train."""
        if self._changes is None:
            return
        if message.workers == 0:
            self._changes.hold(message.longest_s, message.reason)
        elif self._changes.release():
            self._output.say(f"training goes on ({message.reason})")

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

    def _begin_changes(self, attempt: int) -> None:
        if self._changes is not None:
            self._changes.close()
        self._changes = PlanChanges(
            self._loop,
            self._output,
            ranks=self._ranks,
            is_settled=self._is_settled,
            tell=lambda told: self._tell_all(ChangePlan(attempt=attempt, **told)),
        )

    def _ranks(self) -> Sequence[int]:
        """The workers of the running attempt, in the order of their ranks."""
        return range(self._spec.world_size)

    def _is_settled(self) -> bool:
        """Whether no change of the world is under way."""
        return True

    def scale(self, target: object) -> dict[str, Any]:
        """Change the number of workers, and say what is done about it."""
        return {"is_done": False, "text": "this job was not started with --elastic: its workers stay the same"}

    def scale_by(self, change: int) -> None:
        """The user's signal: as many workers more, or fewer."""

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
        self._carry_out(self.coordinator.lost(failure))

    def note_health(self, node_rank: int, health: Health) -> None:
        """A node falls silent, or is heard again."""

    def _carry_out(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case StartAttempt():
                    self._tell_all(self._begin(decision.attempt))
                case Stop():
                    self._end_attempt()
                    limit_s = self._spec.shutdown_timeout_s + self._spec.heartbeat_timeout_s
                    self._loop.call_later(limit_s, partial(self._check_stopped, decision.attempt, limit_s))
                    self._tell_all(decision)
                case End():
                    if self._changes is not None:
                        self._changes.release()  # workers that hold save after their next step
                    self._end_attempt()
                    self._tell_all(decision)

    def _begin(self, attempt: int) -> Start:
        """Everything of an attempt that nodes may report about, before they hear that it starts."""
        self._begin_inquiry(attempt)
        self._begin_changes(attempt)
        return self._open(attempt)

    def _end_attempt(self) -> None:
        """No report about the attempt decides any more."""
        if self._inquiry is not None:
            self._inquiry.close()
        if self._changes is not None:
            self._changes.close()

    def _tell_all(self, message: FromLeader) -> None:
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
