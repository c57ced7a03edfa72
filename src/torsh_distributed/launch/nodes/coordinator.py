"""The leader's decisions as a pure state machine: reports of nodes in, decisions for all nodes out.

::

    gathering ──all joined──► running(a) ──all finished──────────────► over (0)
        │                      │      ▲
        │                   failed    └─all stopped─ stopping(a), next a + 1
        │                      │                         ▲
        │                      ├── restarts left ────────┘
        └── node lost, signal ─┴── none left, node lost, signal ─────► over (not 0)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from torsh_distributed.launch.local.end_report import EndReport
from torsh_distributed.launch.local.exit_causes import SAVED_EXIT_CODE
from torsh_distributed.launch.nodes.records import End, Stop


class JobPhase(StrEnum):
    """The state of the job."""

    GATHERING = "gathering"
    RUNNING = "running"
    STOPPING = "stopping"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class StartAttempt:
    """Open a fresh store and start the workers of this attempt on every node."""

    attempt: int


Decision = StartAttempt | Stop | End


class Coordinator:
    """The state of one job. Every method returns the decisions to carry out on all nodes, in order."""

    def __init__(self, *, num_nodes: int, max_restarts: int) -> None:
        self.phase = JobPhase.GATHERING
        self.attempt = 0
        self.failures: list[EndReport] = []
        """The first failure of every attempt that failed."""
        self._num_nodes = num_nodes
        self._max_restarts = max_restarts
        self._joined: set[int] = set()
        self._done: set[int] = set()
        self._dropped: set[int] = set()

    @property
    def absent(self) -> list[int]:
        """Node ranks that have not joined."""
        return sorted(set(range(self._num_nodes)) - self._joined)

    @property
    def unstopped(self) -> list[int]:
        """Node ranks whose workers may still run."""
        return sorted(self._joined - self._done - self._dropped)

    def joined(self, node_rank: int) -> list[Decision]:
        """A node that fits the job has joined. One that joins later has no worker yet."""
        self._joined.add(node_rank)
        if self.phase is not JobPhase.GATHERING or self.absent:
            self._done.add(node_rank)
            return []
        return [self._begin(0)]

    def failed(self, attempt: int, failure: EndReport) -> list[Decision]:
        """A worker failed. Only the first failure of an attempt decides; the rest are its consequences."""
        if self.phase is not JobPhase.RUNNING or attempt != self.attempt:
            return []
        self.failures.append(failure)
        # Workers that were told to end are not started again here: their node is about to be taken away.
        if attempt >= self._max_restarts or failure.exit_code == SAVED_EXIT_CODE or self._dropped:
            return self._over(End(exit_code=failure.exit_code, failure=failure))
        self.phase = JobPhase.STOPPING
        self._done = set()
        return [Stop(attempt=attempt, failure=failure)]

    def finished(self, node_rank: int, attempt: int) -> list[Decision]:
        """All workers of a node succeeded."""
        if self.phase is not JobPhase.RUNNING or attempt != self.attempt:
            return []
        self._done.add(node_rank)
        return [] if self.unstopped else self._over(End(exit_code=0))

    def resumed(self, node_rank: int) -> None:
        """A node whose workers had all ended has another one."""
        self._done.discard(node_rank)

    def dropped(self, node_rank: int) -> list[Decision]:
        """An elastic job goes on without a node that is lost; the job may be complete now."""
        self._dropped.add(node_rank)
        return [] if self.phase is not JobPhase.RUNNING or self.unstopped else self._over(End(exit_code=0))

    def stopped(self, node_rank: int, attempt: int) -> list[Decision]:
        """A node has no process of the stopped attempt left."""
        if self.phase is not JobPhase.STOPPING or attempt != self.attempt:
            return []
        self._done.add(node_rank)
        return [] if self.unstopped else [self._begin(attempt + 1)]

    def lost(self, failure: EndReport) -> list[Decision]:
        """A node is lost or cannot do its part; the world has a fixed size, so the job ends."""
        if self.phase is JobPhase.OVER:
            return []
        self.failures.append(failure)
        return self._over(End(exit_code=failure.exit_code, failure=failure))

    def interrupted(self, signal: int) -> list[Decision]:
        """The user wants the job to end."""
        return [] if self.phase is JobPhase.OVER else self._over(End(exit_code=128 + signal, signal=signal))

    def _begin(self, attempt: int) -> StartAttempt:
        self.phase = JobPhase.RUNNING
        self.attempt = attempt
        self._done = set()
        return StartAttempt(attempt)

    def _over(self, end: End) -> list[Decision]:
        self.phase = JobPhase.OVER
        return [end]
