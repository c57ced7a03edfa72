"""A node other than 0: connects to the leader, joins, carries records both ways, and detects a lost leader."""

from __future__ import annotations

import errno
import os
import socket
import time
from dataclasses import asdict
from typing import Self

from torsh_distributed.comm.meeting.software_versions import own_software
from torsh_distributed.errors import CommunicationError, ConfigurationError, OperationTimeout
from torsh_distributed.launch.local.end_report import EndReport
from torsh_distributed.launch.local.failure_report import LauncherOutput
from torsh_distributed.launch.local.loop import Loop, Timer
from torsh_distributed.launch.nodes.heartbeat import HeartbeatSender
from torsh_distributed.launch.nodes.launcher_connection import LauncherConnection
from torsh_distributed.launch.nodes.listening_sockets import resolve
from torsh_distributed.launch.nodes.node import Node
from torsh_distributed.launch.nodes.records import (
    AddWorker,
    Ask,
    ChangeMembers,
    ChangePlan,
    End,
    ForgetWorkers,
    FromNode,
    Interrupted,
    JoinAccepted,
    JoinRefused,
    JoinRequest,
    Message,
    Start,
    Stop,
    prepare_records,
)
from torsh_distributed.launch.spec import JobSpec

_CONNECT_TIMEOUT_S = 5.0
_RETRY_S = 0.25
_FIRST_NOTICE_S = 3.0
_NEXT_NOTICE_S = 15.0
_FINISH_TIMEOUT_S = 2.0


class Follower:
    """The connection of a node to the leader. Errors before the job starts are raised out of the loop."""

    def __init__(self, spec: JobSpec, loop: Loop, output: LauncherOutput, node: Node, *, token: str) -> None:
        self._spec = spec
        self._loop = loop
        self._output = output
        self._node = node
        self._token = token
        self._port = spec.meeting_port
        self._connection: LauncherConnection | None = None
        self._is_member = False
        self._connecting: socket.socket | None = None
        self._connect_timer: Timer | None = None
        self._last_problem = "no answer yet"
        self._has_warned = False
        self._heartbeat = HeartbeatSender(
            loop, spec.heartbeat_timeout_s, send=self._send_heartbeat, check=self._check_leader
        )
        node.report = self._report
        self._join_timer = loop.call_later(spec.join_timeout_s, self._give_up)
        loop.call_later(_FIRST_NOTICE_S, self._notice_waiting)
        # Before it joins: from then on the leader waits for this loop.
        prepare_records()
        own_software()
        self._connect()

    # Connecting to the leader

    def _connect(self) -> None:
        """Try to connect without blocking; the loop calls back with the outcome."""
        try:
            family, numeric = resolve(self._spec.master_addr)
        except CommunicationError as error:
            self._retry_connect(f"{error.message}: {error.context.get('reason')}")
            return
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        code = sock.connect_ex((numeric, self._port))
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            self._retry_connect(os.strerror(code))
            return
        self._connecting = sock
        self._loop.watch(sock.fileno(), self._connected, writable=True)
        self._connect_timer = self._loop.call_later(_CONNECT_TIMEOUT_S, lambda: self._abandon_connect("no answer"))

    def _connected(self) -> None:
        sock, self._connecting = self._connecting, None
        if sock is None:
            return
        self._loop.unwatch(sock.fileno())
        if self._connect_timer is not None:
            self._connect_timer.cancel()
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            sock.close()
            self._retry_connect(os.strerror(code))
            return
        self._connection = LauncherConnection(self._loop, sock, self._token, is_server=False, tls=self._spec.tls)
        self._connection.on_message = self._receive
        self._connection.on_close = self._lose
        # Whoever answers here must prove the secret and let this node in soon; it may not be node 0.
        self._connect_timer = self._loop.call_later(_CONNECT_TIMEOUT_S, self._abandon_join)
        self._connection.send(
            JoinRequest(
                node_rank=self._spec.node_rank,
                node_name=socket.gethostname(),
                nnodes=self._spec.nnodes,
                nproc_per_node=self._spec.nproc_per_node,
                max_restarts=self._spec.max_restarts,
                run_id=self._spec.run_id,
                **asdict(own_software()),
                clock_s=time.time(),
            )
        )

    def _abandon_connect(self, problem: str) -> None:
        if self._connecting is not None:
            self._loop.unwatch(self._connecting.fileno())
            self._connecting.close()
            self._connecting = None
        self._retry_connect(problem)

    def _abandon_join(self) -> None:
        if not self._is_member and self._connection is not None:
            self._connection.close()
            self._lose(f"no answer within {_CONNECT_TIMEOUT_S:g} s")

    def _retry_connect(self, problem: str) -> None:
        self._last_problem = problem
        self._connect_timer = self._loop.call_later(_RETRY_S, self._connect)

    @property
    def _where(self) -> str:
        return f"node 0 at {self._spec.master_addr}:{self._port}"

    def _notice_waiting(self) -> None:
        if not self._is_member:
            self._output.say(f"waiting for {self._where}: {self._last_problem}")
            self._loop.call_later(_NEXT_NOTICE_S, self._notice_waiting)

    def _give_up(self) -> None:
        if not self._is_member:
            raise OperationTimeout(
                f"this node could not join {self._where} within {self._spec.join_timeout_s:g} s: {self._last_problem}",
                hint=(
                    "every node needs the same --token-file or TORSH_JOB_TOKEN, and --tls if the others have it"
                    if "let this node in" in self._last_problem
                    else "start `torsh run` with --node-rank 0 there; check --master-addr, --master-port and firewalls"
                ),
                operation="join",
                node_rank=self._spec.node_rank,
            )

    # Exchanging records with the leader

    def _receive(self, message: Message) -> None:
        match message:
            case JoinAccepted():
                self._is_member = True
                self._join_timer.cancel()
                self._node.handle(message)
            case JoinRefused():
                raise ConfigurationError(
                    f"{self._where} refused this node: {message.reason}",
                    hint="give the same command on every node, each with its own --node-rank",
                    node_rank=self._spec.node_rank,
                )
            case Start() | Ask() | ChangeMembers() | ForgetWorkers() | AddWorker() | ChangePlan() | Stop() | End():
                self._node.handle(message)

    def _report(self, message: FromNode) -> None:
        if self._connection is not None and self._is_member:
            self._connection.send(message)
        if isinstance(message, Interrupted):
            # The leader ends the job on all nodes; if it does not answer, this node ends its own workers.
            end = End(exit_code=128 + message.signal, signal=message.signal)
            delay_s = self._spec.heartbeat_timeout_s if self._is_member else 0.0
            self._loop.call_later(delay_s, lambda: self._node.handle(end))

    def _send_heartbeat(self) -> None:
        connection = self._connection  # the loop may drop it meanwhile
        if connection is not None and self._is_member:
            connection.beat()

    def _check_leader(self) -> None:
        if self._connection is None or not self._is_member:
            return
        silent_s = time.monotonic() - self._connection.last_heard_s
        if silent_s > self._spec.heartbeat_timeout_s:
            self._connection.close()
            self._lose(f"no sign of life for {silent_s:.1f} s")

    def _lose(self, reason: str) -> None:
        self._connection = None
        if self._connect_timer is not None:
            self._connect_timer.cancel()
        if not self._is_member:
            # It may be busy with strangers, or not be node 0 yet: try again until --join-timeout.
            self._retry_connect(f"it did not let this node in: {reason}")
            if not self._has_warned:
                self._has_warned = True
                self._output.warn(f"{self._where} did not let this node in: {reason}; trying again")
            return
        failure = EndReport(node_rank=0, node_name=self._spec.master_addr, cause=f"its launcher is gone: {reason}")
        self._node.handle(End(exit_code=1, failure=failure))

    def close(self) -> None:
        """Send what is queued, then close the connection."""
        self._heartbeat.stop()
        if self._connecting is not None:
            self._loop.unwatch(self._connecting.fileno())
            self._connecting.close()
        if self._connection is not None:
            self._connection.finish(timeout_s=_FINISH_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
