"""Messages as ranks send them, for tests of what is beside the launcher."""

from __future__ import annotations

from typing import Any

from torsh_distributed import events
from torsh_distributed.observe.job.job_view import JobView
from torsh_distributed.observe.metrics.rank_collector import RankCollector
from torsh_distributed.observe.metrics.rank_reporter import summary_packet


class FakeRank:
    """Events on a clock of the test's own, collected by the real collector."""

    def __init__(self, rank: int, *, node: str = "node-a") -> None:
        self.collector = RankCollector()
        self._rank = rank
        self._now_s = 100.0
        self._step = 0
        self._sequence = 0
        self._node = node

    def step(
        self, *, compute_s: float = 0.02, wait_s: float = 0.01, data_s: float = 0.0, loss: float | None = 2.0
    ) -> None:
        """One step: data, forward, backward with a wait inside, optimizer."""
        take = self.collector.take
        spans = [("data", data_s), ("forward", 0.3 * compute_s), ("backward", 0.5 * compute_s + wait_s)]
        for name, took in [*spans, ("optimizer", 0.2 * compute_s)]:
            start = self._now_s
            if name == "backward":
                wait = events.WaitEvent(
                    op="all_reduce",
                    group="0",
                    num_started=1,
                    num_bytes=4096,
                    start_s=start + 0.5 * compute_s,
                    duration_s=wait_s,
                )
                take(wait, now_s=start + took)
            self._now_s += took
            take(events.PhaseEvent(phase=name, start_s=start, duration_s=took), now_s=self._now_s)
        self._step += 1
        step = events.StepEvent(
            step=self._step,
            loss=loss,
            duration_s=compute_s + wait_s,
            num_samples=32,
            learning_rate=0.1,
            time=1_700_000_000 + self._now_s,
        )
        take(step, now_s=self._now_s)

    def packet(self) -> dict[str, Any]:
        """The summary of what came since the last one."""
        self._sequence += 1
        return summary_packet(
            self.collector,
            rank=self._rank,
            sequence=self._sequence,
            time=1_700_000_000 + self._now_s,
            clock=1_700_000_000.0,
            facts={"node": self._node, "pid": 1000 + self._rank, "world_size": 2, "backend": "torsh"},
        )


def job_of_two(num_steps: int = 10, *, slowdown: float = 1.0) -> JobView:
    """A job of two ranks; the second computes `slowdown` times as long, and the first waits for it."""
    view = JobView()
    view.take({"type": "job", "run_id": "test", "command": "train.py", "world_size": 2, "num_nodes": 1})
    ranks = [FakeRank(0), FakeRank(1)]
    for number in range(num_steps):
        ranks[0].step(wait_s=0.01 + 0.02 * (slowdown - 1), loss=2.0 - 0.1 * number)
        ranks[1].step(compute_s=0.02 * slowdown, loss=2.0 - 0.1 * number)
    for rank in ranks:
        view.take(rank.packet())
    return view
