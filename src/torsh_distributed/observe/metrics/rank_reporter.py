"""Sends a summary of a rank's metrics every other second, from a thread of its own, never through a process group."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
from typing import Any

from torsh_distributed import events, known_variables
from torsh_distributed.observe.loops.optimizer_steps import OptimizerSteps
from torsh_distributed.observe.metrics.host_memory import memory_use
from torsh_distributed.observe.metrics.machine_sensors import MachineSensors, ProcessSensors
from torsh_distributed.observe.metrics.operation_rates import AxisOf
from torsh_distributed.observe.metrics.rank_collector import RankCollector
from torsh_distributed.observe.metrics.rank_metrics import Send
from torsh_distributed.observe.metrics.step_record import pack_steps

MAX_PACKET_BYTES = 60 * 1024
"""The line to the launcher takes 64 KiB, with what it adds itself."""
_ROW_BYTES = {"timeline": 80, "custom": 500, "steps": 1, "metrics": 560}
"""The most that a row of each takes, but for texts of the user's; steps are one text."""
INTERVAL_S = 2.0
"""Between summaries. Each wakes the rank, the launcher and the observer, whose Python then runs with cold caches."""
_SUMMARIES_A_METRIC = 2
"""Steps travel in every summary. What is read and reckoned from them comes with each second one, and with the first two
and the last: statistics of hundreds of values cost as much again, on both ends."""
_C10D = "torch.distributed.distributed_c10d"
_log = logging.getLogger(__name__)


class RankReporter:
    """The thread. What goes wrong in it is logged once and never reaches training."""

    def __init__(
        self, collector: RankCollector, send: Send, *, interval_s: float = INTERVAL_S, machine_interval_s: float = 5.0
    ) -> None:
        self._collector = collector
        self._send = send
        self._interval_s = interval_s
        self._sensors = ProcessSensors()
        # One rank of a node reads the node.
        self._machine = MachineSensors(machine_interval_s) if known_variables.whole_number("LOCAL_RANK") == 0 else None
        self._optimizer_steps = OptimizerSteps(collector.note_operations, collector.note_averaged_group)
        self._sequence = 0
        node = os.environ.get("NODE_RANK", "")
        self._node = int(node) if node.isdigit() else 0
        self._has_failed = False
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self.facts: dict[str, Any] = {}
        """What is known about this rank besides numbers, such as its mesh."""
        collector.attach()
        self._thread = threading.Thread(target=self._run, name="torsh-metrics", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(self._until_next_s()):
            self.report()

    def _until_next_s(self) -> float:
        """To the next whole interval of the wall clock, so that ranks are held up in the same step.

        A step takes as long as its slowest rank: if every rank made its summary at a moment of its own, each would wait
        for the summaries of all.
        """
        remaining_s = self._interval_s - time.time() % self._interval_s
        return remaining_s if remaining_s > self._interval_s / 10 else remaining_s + self._interval_s

    def _is_turn(self) -> bool:
        """Whether metrics come along. Nodes take turns: not all ranks of a large job tell everything at once."""
        turn = round(time.time() / self._interval_s) + self._node
        return self._sequence <= 2 or turn % _SUMMARIES_A_METRIC == 0

    def note_axes(self, axis_of: AxisOf) -> None:
        """Which groups lie along which axis of the mesh."""
        self._collector.note_axes(axis_of)

    def install_hooks(self) -> None:
        """See the steps of plain loops."""
        self._optimizer_steps.install()

    def report(self) -> None:
        """Send a summary now."""
        try:
            with self._lock:
                self._send(self._packet())
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                _log.exception("metrics could not be reported; training continues without them")

    def close(self) -> None:
        """Send the last summary and stop. Closing again does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join(timeout=2)
        self.report()
        self._optimizer_steps.remove()
        self._collector.detach()

    def _packet(self) -> dict[str, Any]:
        collector = self._collector
        self._sequence += 1
        found = {"rank": _rank(), "sequence": self._sequence}
        if not self._is_turn() and not self._closing.is_set():
            collector.fold_steps()
            return step_packet(collector, time=time.time(), clock=time.time() - time.monotonic(), **found)
        collector.fold()
        self._sensors.read(collector.metrics)
        if self._machine is not None:
            self._machine.read(collector.metrics)
        return summary_packet(
            collector,
            time=time.time(),
            clock=time.time() - time.monotonic(),
            facts={**_place(), "memory": memory_use(), **self.facts},
            **found,
        )


def summary_packet(
    collector: RankCollector, *, rank: int, sequence: int, time: float, clock: float, facts: dict[str, Any]
) -> dict[str, Any]:
    """The message about what was measured; it takes the steps and marks that have come since the last one.

    `clock` is the wall clock minus the monotonic clock.
    """
    collector.settle()
    packet = _within_limit(
        {
            **step_packet(collector, rank=rank, sequence=sequence, time=time, clock=clock),
            "metrics": collector.metrics.summary(),
            "custom": collector.metrics.definitions(),
            "timeline": [[name, round(start, 6), round(took, 6)] for name, start, took in collector.timeline],
            "timeline_step": collector.timeline_step,
            "facts": facts,
        }
    )
    collector.timeline_taken()
    return packet


def step_packet(collector: RankCollector, *, rank: int, sequence: int, time: float, clock: float) -> dict[str, Any]:
    """The message with the steps and marks alone; it takes them as `summary_packet` does."""
    return {
        "type": "metrics",
        "rank": rank,
        "sequence": sequence,
        "time": time,
        "clock": clock,
        "steps": pack_steps(collector.steps.popleft() for _ in range(len(collector.steps))),
        "marks": [collector.marks.popleft() for _ in range(len(collector.marks))],
    }


def _within_limit(packet: dict[str, Any]) -> dict[str, Any]:
    """The packet in at most MAX_PACKET_BYTES: the timeline goes first, steps never: all that are kept fit."""
    # Encoding it to see its length costs as much as sending it: rows that cannot be too long are only counted.
    if not packet["marks"] and sum(len(packet[name]) * size for name, size in _ROW_BYTES.items()) < MAX_PACKET_BYTES:
        return packet
    for name in ("timeline", "marks", "custom", "metrics"):
        while len(json.dumps(packet, default=str)) > MAX_PACKET_BYTES and packet[name]:
            packet[name] = packet[name][(len(packet[name]) + 1) // 2 :]
    return packet


def _rank() -> int:
    known = events.current_rank()
    text = os.environ.get("RANK", "")
    return known if known >= 0 else int(text) if text.isdigit() else 0


def _place() -> dict[str, Any]:
    found: dict[str, Any] = {"node": socket.gethostname(), "pid": os.getpid()}
    for name, variable in (
        ("local_rank", "LOCAL_RANK"),
        ("world_size", "WORLD_SIZE"),
        ("node_rank", "NODE_RANK"),
        ("attempt", "TORCHELASTIC_RESTART_COUNT"),
    ):
        text = os.environ.get(variable, "")
        if text.isdigit():
            found[name] = int(text)
    c10d = sys.modules.get(_C10D)
    if c10d is not None and getattr(c10d, "is_initialized", bool)():
        found["backend"] = str(c10d.get_backend())
        found["world_size"] = c10d.get_world_size()
    return found
