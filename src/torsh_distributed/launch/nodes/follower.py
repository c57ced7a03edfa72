"""A node that follows: finds the leader, joins, carries records both ways, and notices when the leader is gone."""

from __future__ import annotations

import errno
import os
import socket
import time
from typing import Self

from torsh_distributed.errors import CommunicationError, ConfigurationError, OperationTimeout
from torsh_distributed.launch.failure_report import Voice
from torsh_distributed.launch.local.loop import Loop, Timer
from torsh_distributed.launch.nodes.heartbeat import Pulse
from torsh_distributed.launch.nodes.listening_sockets import resolve
from torsh_distributed.launch.nodes.node import Node
from torsh_distributed.launch.nodes.records import (
    End,
    Failure,
    FromNode,
    Heartbeat,
    Hello,
    Interrupted,
    Message,
    Refused,
    Start,
    Stop,
    Welcome,
)
from torsh_distributed.launch.nodes.signed_connection import Connection
from torsh_distributed.launch.spec import DEFAULT_MASTER_PORT, JobSpec

_CONNECT_TIMEOUT_S = 5.0
_RETRY_S = 0.25
_FIRST_NOTICE_S = 3.0
_NEXT_NOTICE_S = 15.0
_FINISH_TIMEOUT_S = 2.0


class Follower:
    """The link of a node other than 0 to the leader. Errors before the job started are raised out of the loop."""

    def __init__(self, spec: JobSpec, loop: Loop, voice: Voice, node: Node, *, token: str) -> None:
        self._spec = spec
        self._loop = loop
        self._voice = voice
        self._node = node
        self._token = token
        self._port = spec.master_port or DEFAULT_MASTER_PORT
        self._connection: Connection | None = None
        self._is_member = False
        self._dialling: socket.socket | None = None
        self._dial_timer: Timer | None = None
        self._last_problem = "no answer yet"
        self._pulse = Pulse(loop, spec.heartbeat_timeout_s, self._beat)
        node.tell = self._tell
        self._join_timer = loop.call_later(spec.join_timeout_s, self._give_up)
        loop.call_later(_FIRST_NOTICE_S, self._notice_waiting)
        self._dial()

    # Finding the leader

    def _dial(self) -> None:
        """Try to connect without blocking; the loop tells how it went."""
        try:
            family, numeric = resolve(self._spec.master_addr)
        except CommunicationError as error:
            self._dial_again(f"{error.message}: {error.context.get('reason')}")
            return
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        code = sock.connect_ex((numeric, self._port))
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            self._dial_again(os.strerror(code))
            return
        self._dialling = sock
        self._loop.watch(sock.fileno(), self._dialled, writable=True)
        self._dial_timer = self._loop.call_later(_CONNECT_TIMEOUT_S, lambda: self._hang_up("no answer"))

    def _dialled(self) -> None:
        sock, self._dialling = self._dialling, None
        if sock is None:
            return
        self._loop.unwatch(sock.fileno())
        if self._dial_timer is not None:
            self._dial_timer.cancel()
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            sock.close()
            self._dial_again(os.strerror(code))
            return
        self._connection = Connection(self._loop, sock, self._token, is_server=False)
        self._connection.on_message = self._hear
        self._connection.on_close = self._lose
        self._connection.send(
            Hello(
                node_rank=self._spec.node_rank,
                node_name=socket.gethostname(),
                nnodes=self._spec.nnodes,
                nproc_per_node=self._spec.nproc_per_node,
                max_restarts=self._spec.max_restarts,
                run_id=self._spec.run_id,
            )
        )

    def _hang_up(self, problem: str) -> None:
        if self._dialling is not None:
            self._loop.unwatch(self._dialling.fileno())
            self._dialling.close()
            self._dialling = None
        self._dial_again(problem)

    def _dial_again(self, problem: str) -> None:
        self._last_problem = problem
        self._dial_timer = self._loop.call_later(_RETRY_S, self._dial)

    @property
    def _where(self) -> str:
        return f"node 0 at {self._spec.master_addr}:{self._port}"

    def _notice_waiting(self) -> None:
        if not self._is_member:
            self._voice.say(f"waiting for {self._where}: {self._last_problem}")
            self._loop.call_later(_NEXT_NOTICE_S, self._notice_waiting)

    def _give_up(self) -> None:
        if not self._is_member:
            raise OperationTimeout(
                f"the launcher of {self._where} was not reached within {self._spec.join_timeout_s:g} s",
                hint="start `torsh run` with --node-rank 0 there; check --master-addr, --master-port and firewalls",
                operation="join",
                node_rank=self._spec.node_rank,
                reason=self._last_problem,
            )

    # Talking with the leader

    def _hear(self, message: Message) -> None:
        match message:
            case Welcome():
                self._is_member = True
                self._join_timer.cancel()
                self._node.obey(message)
            case Refused():
                raise ConfigurationError(
                    f"{self._where} refused this node: {message.reason}",
                    hint="give the same command on every node, each with its own --node-rank",
                    node_rank=self._spec.node_rank,
                )
            case Start() | Stop() | End():
                self._node.obey(message)

    def _tell(self, message: FromNode) -> None:
        if self._connection is not None and self._is_member:
            self._connection.send(message)
        if isinstance(message, Interrupted):
            # The leader ends the job on all nodes; this node ends its part alone if the leader does not answer.
            end = End(exit_code=128 + message.signal, signal=message.signal)
            delay_s = self._spec.heartbeat_timeout_s if self._is_member else 0.0
            self._loop.call_later(delay_s, lambda: self._node.obey(end))

    def _beat(self) -> None:
        if self._connection is None or not self._is_member:
            return
        silent_s = time.monotonic() - self._connection.last_heard_s
        if silent_s > self._spec.heartbeat_timeout_s:
            self._connection.close()
            self._lose(f"no sign of life for {silent_s:.1f} s")
        else:
            self._connection.send(Heartbeat())

    def _lose(self, reason: str) -> None:
        self._connection = None
        if not self._is_member:
            raise CommunicationError(
                f"{self._where} did not let this node in: {reason}",
                hint="every node needs the same TORSH_JOB_TOKEN or --token-file, and --rdzv-id if there is no token",
                operation="join",
                node_rank=self._spec.node_rank,
            )
        failure = Failure(node_rank=0, node_name=self._spec.master_addr, cause=f"its launcher is gone: {reason}")
        self._node.obey(End(exit_code=1, failure=failure))

    def close(self) -> None:
        """Send what is still queued, then hang up."""
        self._pulse.stop()
        if self._dialling is not None:
            self._loop.unwatch(self._dialling.fileno())
            self._dialling.close()
        if self._connection is not None:
            self._connection.finish(timeout_s=_FINISH_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
