"""Accepts the launchers of other nodes at the leader, checks them, and detects lost ones."""

from __future__ import annotations

import socket
import time
from functools import partial
from typing import Self

from torsh_distributed.comm.meeting.software_versions import NodeSoftware, own_software, software_differences
from torsh_distributed.comm.trust.stranger_pool import PROOF_TIMEOUT_S, StrangerPool
from torsh_distributed.launch.control.worker_health import Health, HealthState
from torsh_distributed.launch.local.end_report import EndReport
from torsh_distributed.launch.local.failure_report import LauncherOutput, join_numbers
from torsh_distributed.launch.local.loop import Loop, Timer
from torsh_distributed.launch.nodes.coordinator import JobPhase
from torsh_distributed.launch.nodes.heartbeat import HeartbeatSender
from torsh_distributed.launch.nodes.launcher_connection import LauncherConnection
from torsh_distributed.launch.nodes.leader import Leader
from torsh_distributed.launch.nodes.listening_sockets import listen_on
from torsh_distributed.launch.nodes.records import (
    DiagnosisWanted,
    Ended,
    Failed,
    Finished,
    Interrupted,
    JoinAccepted,
    JoinRefused,
    JoinRequest,
    Measured,
    MemberSaid,
    Message,
    Said,
    Stopped,
    prepare_records,
)
from torsh_distributed.launch.spec import JobSpec

_FINISH_TIMEOUT_S = 2.0
_FIRST_NOTICE_S = 3.0
_NEXT_NOTICE_S = 15.0
_SHOWN_REFUSALS = 5
_MAX_CLOCK_SKEW_S = 5.0


def disagreement(spec: JobSpec, request: JoinRequest) -> str | None:
    """Why a node does not fit the leader's job, or None if it does."""
    compared: dict[str, tuple[int | str, int | str]] = {
        "--max-restarts": (spec.max_restarts, request.max_restarts),
        "--rdzv-id": (spec.run_id, request.run_id),
    }
    takes_others = spec.spans_nodes and spec.elastic is not None and spec.elastic.discovery is not None
    if not takes_others:
        # Where nodes come and go, each with workers of its own, these two are what a node was told when it came.
        counts = {
            "--nnodes": (spec.nnodes, request.nnodes),
            "--nproc-per-node": (spec.nproc_per_node, request.nproc_per_node),
        }
        compared = {**counts, **compared}
    differing = [
        f"{name} is {their} there and {our} on node 0" for name, (our, their) in compared.items() if our != their
    ]
    theirs_installed = NodeSoftware(python=request.python, torch=request.torch, torsh=request.torsh)
    differing += software_differences(own_software(), theirs_installed)
    if differing:
        return "; ".join(differing)
    if not request.node_rank > 0 or (request.node_rank >= spec.nnodes and not takes_others):
        return f"node rank {request.node_rank} is not between 1 and {spec.nnodes - 1}"
    return None


class LauncherListener:
    """Listens on the master port of a job with several nodes."""

    def __init__(
        self, spec: JobSpec, loop: Loop, output: LauncherOutput, leader: Leader, *, token: str, log_name: str
    ) -> None:
        self._spec = spec
        self._loop = loop
        self._output = output
        self._leader = leader
        self._token = token
        self._log_name = log_name
        self._strangers: StrangerPool[LauncherConnection] = StrangerPool()
        self._deadlines: dict[LauncherConnection, Timer] = {}
        self._summary_timer: Timer | None = None
        self._members: dict[int, LauncherConnection] = {}
        self._silent: set[int] = set()
        self._names = {0: socket.gethostname()}
        self._refusals: list[str] = []
        # Before the first node comes: from then on others wait for this loop.
        prepare_records()
        own_software()
        self._listener = listen_on(spec.master_addr, spec.meeting_port)
        self._listener.setblocking(False)
        loop.watch(self._listener.fileno(), self._accept)
        loop.call_later(_FIRST_NOTICE_S, self._notice_absent)
        loop.call_later(spec.join_timeout_s, self._end_if_absent)
        self._heartbeat = HeartbeatSender(
            loop, spec.heartbeat_timeout_s, send=self._send_heartbeats, check=self._check_members
        )

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except OSError:
            # The client left before it was accepted.
            return
        connection = LauncherConnection(self._loop, sock, self._token, is_server=True, tls=self._spec.tls)
        connection.on_message = partial(self._handle_join_request, connection)
        connection.on_close = partial(self._turn_away, connection)
        too_slow = partial(self._turn_away, connection, f"no proof of the job's secret within {PROOF_TIMEOUT_S:g} s")
        self._deadlines[connection] = self._loop.call_later(PROOF_TIMEOUT_S, too_slow)
        evicted = self._strangers.admit(connection, str(address[0]))
        if evicted is not None:
            self._turn_away(evicted, "too many at once without a proof of the job's secret")

    def _turn_away(self, connection: LauncherConnection, reason: str) -> None:
        """Close a connection that has not joined; those are reported together, in one line."""
        self._deadlines.pop(connection).cancel()
        self._strangers.refuse(connection, reason)
        connection.close()
        if self._summary_timer is None:
            now_s = time.monotonic()
            due_s = self._strangers.summary_due_s(now_s)
            self._summary_timer = self._loop.call_later(max(0.0, (due_s or now_s) - now_s), self._summarize)

    def _summarize(self) -> None:
        self._summary_timer = None
        self._refuse(self._strangers.summary(time.monotonic()))

    def _refuse(self, what: str) -> None:
        self._refusals.append(what)
        self._output.warn(what)

    def _handle_join_request(self, connection: LauncherConnection, message: Message) -> None:
        """The first record of a connection that proved the secret: the node joins, or is told why not."""
        if not isinstance(message, JoinRequest):
            self._turn_away(connection, "its first record is not a join request")
            return
        self._deadlines.pop(connection).cancel()
        self._strangers.release(connection)
        reason = disagreement(self._spec, message)
        if reason is None and message.node_rank in self._members:
            reason = f"node rank {message.node_rank} is already taken by {self._names[message.node_rank]}"
        if reason is not None:
            connection.send(JoinRefused(reason=reason))
            connection.finish(timeout_s=_FINISH_TIMEOUT_S)
            self._refuse(f"node {message.node_rank} ({message.node_name}) was refused: {reason}")
            return
        skew_s = message.clock_s - time.time()
        if abs(skew_s) > _MAX_CLOCK_SKEW_S:
            self._output.warn(
                f"the clock of node {message.node_rank} ({message.node_name}) is {abs(skew_s):.0f} s "
                f"{'ahead of' if skew_s > 0 else 'behind'} node 0's: times in reports and events do not compare"
            )
        node_rank = message.node_rank
        self._members[node_rank] = connection
        self._names[node_rank] = message.node_name
        connection.on_message = partial(self._receive, node_rank)
        connection.on_close = partial(self._lose, node_rank)
        connection.send(JoinAccepted(log_name=self._log_name))
        self._leader.join(node_rank, connection.send)

    def _receive(self, node_rank: int, message: Message) -> None:
        if isinstance(
            message, Failed | Ended | Said | Finished | Stopped | Measured | DiagnosisWanted | Interrupted | MemberSaid
        ):
            self._leader.receive(node_rank, message)

    def _lose(self, node_rank: int, reason: str) -> None:
        self._members.pop(node_rank).close()
        cause = f"its launcher is gone: {reason}"
        self._leader.lose(EndReport(node_rank=node_rank, node_name=self._names[node_rank], cause=cause))

    def _send_heartbeats(self) -> None:
        for member in list(self._members.values()):
            member.beat()

    def _check_members(self) -> None:
        for node_rank, member in list(self._members.items()):
            silent_s = time.monotonic() - member.last_heard_s
            if silent_s > self._spec.heartbeat_timeout_s:
                self._lose(node_rank, f"no sign of life for {silent_s:.1f} s")
            else:
                self._note_silence(node_rank, silent_s)

    def _note_silence(self, node_rank: int, silent_s: float) -> None:
        """Tell when a node falls silent, and when it is heard again."""
        is_silent = silent_s > self._heartbeat.notice_s
        if is_silent and node_rank not in self._silent:
            self._silent.add(node_rank)
            self._leader.note_health(node_rank, Health(HealthState.CRITICAL, f"no sign of life for {silent_s:.1f} s"))
        elif not is_silent and node_rank in self._silent:
            self._silent.discard(node_rank)
            self._leader.note_health(node_rank, Health(HealthState.HEALTHY, "it is heard again"))

    def _notice_absent(self) -> None:
        absent = self._leader.coordinator.absent
        if absent and self._leader.coordinator.phase is JobPhase.GATHERING:
            self._output.say(f"waiting for node {join_numbers(absent)} of {self._spec.nnodes}")
            self._loop.call_later(_NEXT_NOTICE_S, self._notice_absent)

    def _end_if_absent(self) -> None:
        absent = self._leader.coordinator.absent
        if absent and self._leader.coordinator.phase is JobPhase.GATHERING:
            if self._summary_timer is not None:
                self._summary_timer.fire()
            cause = f"did not join within {self._spec.join_timeout_s:g} s"
            self._leader.lose(
                EndReport(
                    node_rank=absent[0],
                    node_name="",
                    cause=f"node {join_numbers(absent)} of {self._spec.nnodes} {cause}",
                    last_lines=tuple(self._refusals[-_SHOWN_REFUSALS:]),
                )
            )

    def close(self) -> None:
        """Send what is queued, then close every connection."""
        self._heartbeat.stop()
        self._loop.unwatch(self._listener.fileno())
        self._listener.close()
        if self._summary_timer is not None:
            self._summary_timer.fire()
        for connection in self._deadlines:
            connection.close()
        for member in self._members.values():
            member.finish(timeout_s=_FINISH_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
