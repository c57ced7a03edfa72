"""The leader's hands: it hears every node, asks the coordinator what to do, and tells every node."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.distributed as dist

from torsh_distributed.launch.failure_report import join_numbers
from torsh_distributed.launch.local.loop import Loop
from torsh_distributed.launch.nodes.coordinator import Begin, Coordinator, Decision, Phase
from torsh_distributed.launch.nodes.listening_sockets import serve_store
from torsh_distributed.launch.nodes.records import (
    End,
    Failed,
    Failure,
    Finished,
    FromLeader,
    FromNode,
    Interrupted,
    Start,
    Stop,
    Stopped,
)
from torsh_distributed.launch.spec import JobSpec


class Leader:
    """Runs on node 0. Every attempt gets a store of its own, served here, so that no key of an earlier one is met."""

    def __init__(self, spec: JobSpec, loop: Loop) -> None:
        self._spec = spec
        self._loop = loop
        self._store: dist.TCPStore | None = None
        self._tell: dict[int, Callable[[FromLeader], None]] = {}
        self.coordinator = Coordinator(num_nodes=spec.nnodes, max_restarts=spec.max_restarts)

    def join(self, node_rank: int, tell: Callable[[FromLeader], None]) -> None:
        """Take in a node that fits the job; `tell` carries decisions to it. The last one starts the job."""
        self._tell[node_rank] = tell
        self._carry_out(self.coordinator.joined(node_rank))

    def hear(self, node_rank: int, message: FromNode) -> None:
        """Take a report of a node."""
        match message:
            case Failed():
                self._carry_out(self.coordinator.failed(message.attempt, message.failure))
            case Finished():
                self._carry_out(self.coordinator.finished(node_rank, message.attempt))
            case Stopped():
                self._carry_out(self.coordinator.stopped(node_rank, message.attempt))
            case Interrupted():
                self._carry_out(self.coordinator.interrupted(message.signal))

    def lose(self, failure: Failure) -> None:
        """A node is gone."""
        if failure.node_rank != 0:
            self._tell.pop(failure.node_rank, None)
        self._carry_out(self.coordinator.lost(failure))

    def _carry_out(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Begin():
                    message: FromLeader = self._open(decision.attempt)
                case Stop():
                    message = decision
                    limit_s = self._spec.shutdown_timeout_s + self._spec.heartbeat_timeout_s
                    self._loop.call_later(limit_s, partial(self._check_stopped, decision.attempt, limit_s))
                case End():
                    message = decision
            for tell in list(self._tell.values()):
                tell(message)

    def _check_stopped(self, attempt: int, limit_s: float) -> None:
        coordinator = self.coordinator
        if coordinator.phase is Phase.STOPPING and coordinator.attempt == attempt:
            cause = f"node {join_numbers(coordinator.unstopped)} did not end its workers within {limit_s:g} s"
            self.lose(Failure(node_rank=coordinator.unstopped[0], node_name="", cause=cause))

    def _open(self, attempt: int) -> Start:
        """A fresh store for the attempt; the one before ends first, for it may hold the port."""
        self._store = None
        port = (self._spec.master_port or 0) if self._spec.nnodes == 1 else 0
        self._store, chosen = serve_store(self._spec.master_addr, port)
        return Start(attempt=attempt, master_addr=self._spec.master_addr, master_port=chosen)
