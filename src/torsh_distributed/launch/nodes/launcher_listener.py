"""The leader's door: launchers of the other nodes come in here, are checked, heard, and missed when silent."""

from __future__ import annotations

import socket
import time
from functools import partial
from typing import Self

from torsh_distributed.launch.failure_report import Voice, join_numbers
from torsh_distributed.launch.local.loop import Loop, Timer
from torsh_distributed.launch.nodes.coordinator import Phase
from torsh_distributed.launch.nodes.heartbeat import Pulse
from torsh_distributed.launch.nodes.leader import Leader
from torsh_distributed.launch.nodes.listening_sockets import listen_on
from torsh_distributed.launch.nodes.records import (
    Failed,
    Failure,
    Finished,
    Heartbeat,
    Hello,
    Interrupted,
    Message,
    Refused,
    Stopped,
    Welcome,
)
from torsh_distributed.launch.nodes.signed_connection import Connection
from torsh_distributed.launch.spec import DEFAULT_MASTER_PORT, JobSpec

_HELLO_TIMEOUT_S = 10.0
_MAX_STRANGERS = 128
_FINISH_TIMEOUT_S = 2.0
_FIRST_NOTICE_S = 3.0
_NEXT_NOTICE_S = 15.0
_SHOWN_REFUSALS = 5


def disagreement(spec: JobSpec, hello: Hello) -> str | None:
    """Why a node does not fit the job of the leader, or None if it does."""
    ours = {
        "--nnodes": spec.nnodes,
        "--nproc-per-node": spec.nproc_per_node,
        "--max-restarts": spec.max_restarts,
        "--rdzv-id": spec.run_id,
    }
    theirs = (hello.nnodes, hello.nproc_per_node, hello.max_restarts, hello.run_id)
    differing = [
        f"{name} is {their} there and {our} on node 0"
        for (name, our), their in zip(ours.items(), theirs, strict=True)
        if our != their
    ]
    if differing:
        return "; ".join(differing)
    if not 0 < hello.node_rank < spec.nnodes:
        return f"node rank {hello.node_rank} is not between 1 and {spec.nnodes - 1}"
    return None


class Reception:
    """Listens on the master port of a job with several nodes."""

    def __init__(self, spec: JobSpec, loop: Loop, voice: Voice, leader: Leader, *, token: str, log_name: str) -> None:
        self._spec = spec
        self._loop = loop
        self._voice = voice
        self._leader = leader
        self._token = token
        self._log_name = log_name
        self._strangers: dict[Connection, Timer] = {}
        self._members: dict[int, Connection] = {}
        self._names = {0: socket.gethostname()}
        self._refusals: list[str] = []
        self._listener = listen_on(spec.master_addr, spec.master_port or DEFAULT_MASTER_PORT)
        self._listener.setblocking(False)
        loop.watch(self._listener.fileno(), self._accept)
        loop.call_later(_FIRST_NOTICE_S, self._notice_absent)
        loop.call_later(spec.join_timeout_s, self._end_if_absent)
        self._pulse = Pulse(loop, spec.heartbeat_timeout_s, self._beat)

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except OSError:
            # The visitor left again before it was let in.
            return
        if len(self._strangers) >= _MAX_STRANGERS:
            sock.close()
            return
        visitor = Connection(self._loop, sock, self._token, is_server=True)
        visitor.on_message = partial(self._meet, visitor, str(address[0]))
        visitor.on_close = partial(self._turn_away, visitor, str(address[0]))
        too_slow = partial(self._turn_away, visitor, str(address[0]), f"it said nothing for {_HELLO_TIMEOUT_S:g} s")
        self._strangers[visitor] = self._loop.call_later(_HELLO_TIMEOUT_S, too_slow)

    def _turn_away(self, visitor: Connection, address: str, reason: str) -> None:
        self._strangers.pop(visitor).cancel()
        visitor.close()
        self._refuse(f"a connection from {address} was turned away: {reason}")

    def _refuse(self, what: str) -> None:
        self._refusals.append(what)
        self._voice.warn(what)

    def _meet(self, visitor: Connection, address: str, message: Message) -> None:
        """The first record of a visitor that knows the token: it joins, or learns why not."""
        if not isinstance(message, Hello):
            self._turn_away(visitor, address, "it did not introduce itself")
            return
        self._strangers.pop(visitor).cancel()
        reason = disagreement(self._spec, message)
        if reason is None and message.node_rank in self._members:
            reason = f"node rank {message.node_rank} is already taken by {self._names[message.node_rank]}"
        if reason is not None:
            visitor.send(Refused(reason=reason))
            visitor.finish(timeout_s=_FINISH_TIMEOUT_S)
            self._refuse(f"node {message.node_rank} ({message.node_name}) was refused: {reason}")
            return
        node_rank = message.node_rank
        self._members[node_rank] = visitor
        self._names[node_rank] = message.node_name
        visitor.on_message = partial(self._hear, node_rank)
        visitor.on_close = partial(self._lose, node_rank)
        visitor.send(Welcome(log_name=self._log_name))
        self._leader.join(node_rank, visitor.send)

    def _hear(self, node_rank: int, message: Message) -> None:
        if isinstance(message, Failed | Finished | Stopped | Interrupted):
            self._leader.hear(node_rank, message)

    def _lose(self, node_rank: int, reason: str) -> None:
        self._members.pop(node_rank).close()
        cause = f"its launcher is gone: {reason}"
        self._leader.lose(Failure(node_rank=node_rank, node_name=self._names[node_rank], cause=cause))

    def _beat(self) -> None:
        for node_rank, member in list(self._members.items()):
            silent_s = time.monotonic() - member.last_heard_s
            if silent_s > self._spec.heartbeat_timeout_s:
                self._lose(node_rank, f"no sign of life for {silent_s:.1f} s")
            else:
                member.send(Heartbeat())

    def _notice_absent(self) -> None:
        absent = self._leader.coordinator.absent
        if absent and self._leader.coordinator.phase is Phase.GATHERING:
            self._voice.say(f"waiting for node {join_numbers(absent)} of {self._spec.nnodes}")
            self._loop.call_later(_NEXT_NOTICE_S, self._notice_absent)

    def _end_if_absent(self) -> None:
        absent = self._leader.coordinator.absent
        if absent and self._leader.coordinator.phase is Phase.GATHERING:
            cause = f"did not join within {self._spec.join_timeout_s:g} s"
            self._leader.lose(
                Failure(
                    node_rank=absent[0],
                    node_name="",
                    cause=f"node {join_numbers(absent)} of {self._spec.nnodes} {cause}",
                    last_lines=tuple(self._refusals[-_SHOWN_REFUSALS:]),
                )
            )

    def close(self) -> None:
        """Send what is still queued, then hang up on everyone."""
        self._pulse.stop()
        self._loop.unwatch(self._listener.fileno())
        self._listener.close()
        for visitor in self._strangers:
            visitor.close()
        for member in self._members.values():
            member.finish(timeout_s=_FINISH_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
