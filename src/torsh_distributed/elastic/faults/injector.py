"""Finds the moment of each fault: watches the points that this rank reaches, and inflicts what is meant for it."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torsh_distributed import events, known_variables
from torsh_distributed.elastic.faults.fault import LOG_VARIABLE, Fault, FaultKind, faults_from_environment
from torsh_distributed.elastic.faults.inflicting import inflict
from torsh_distributed.private_files import open_private

_ALIASES = {"step": "", "average gradients": "all_reduce", "allreduce": "all_reduce"}
"""Names of points to names in faults."""
_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "barrier")


class Injector:
    """The faults of one process. `log` notes them and every step, for `fault_log`; a fault in it happens only once."""

    def __init__(self, faults: Sequence[Fault], *, log: Path | None = None) -> None:
        self._faults = tuple(faults)
        self._log = log
        self._step: int | None = None
        self._done: set[Fault] = set()
        self._newest_checkpoint: Path | None = None

    def watch(self) -> list[object]:
        """Start; returns functions that end it."""
        ending: list[object] = [events.watch_points(self.reach)]
        ending.append(events.subscribe(self._note_checkpoint, events.CheckpointEvent))
        if any(fault.point in _OPERATIONS for fault in self._faults):
            # Operations are points only while somebody wants their durations.
            ending.append(events.subscribe(lambda event: None, events.WaitEvent))
        return ending

    def reach(self, point: str, step: int | None) -> None:
        """A point was reached: inflict what is meant for this rank, step and point; usually nothing."""
        if multiprocessing.parent_process() is not None:
            return  # a child of a rank, such as a loader's worker
        name = _ALIASES.get(point, point)
        if point == "step":
            self._step = step
            self._note({"kind": "step", "step": step})
        if self._step is None:
            return
        rank, attempt = _rank(), known_variables.whole_number("TORCHELASTIC_RESTART_COUNT")
        for fault in self._faults:
            is_here = fault.rank == rank and fault.attempt == attempt and fault.point == name
            if fault.kind is FaultKind.SLOW and is_here and self._step >= fault.step:
                if self._step == fault.step:
                    self._announce(fault)
                inflict(fault)
            elif is_here and fault.step == self._step and not self._has_happened(fault):
                self._done.add(fault)
                self._announce(fault)
                inflict(fault, newest_checkpoint=self._newest_checkpoint)

    def _has_happened(self, fault: Fault) -> bool:
        """Here, or to a process that this one replaced."""
        if fault in self._done:
            return True
        if self._log is None or not self._log.exists():
            return False
        return json.dumps(str(fault)) in self._log.read_text()

    def _announce(self, fault: Fault) -> None:
        print(f"fault: {fault}", file=sys.stderr, flush=True)
        self._note({"kind": "fault", "step": self._step, "fault": str(fault)})

    def _note(self, record: dict[str, object]) -> None:
        if self._log is None:
            return
        line = json.dumps({"time": time.time(), "rank": _rank(), "pid": os.getpid(), **record}) + "\n"
        try:
            descriptor = open_private(self._log, os.O_WRONLY | os.O_APPEND)
            try:
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)
        except OSError as error:  # a full disk may be the fault itself: training must not end by the log of it
            print(f"fault log: {self._log} cannot be written: {error}", file=sys.stderr, flush=True)

    def _note_checkpoint(self, event: events.Event) -> None:
        assert isinstance(event, events.CheckpointEvent)
        if event.action == "saved" and event.error is None:
            self._newest_checkpoint = Path(event.path)


@contextmanager
def inject(*faults: Fault | str) -> Iterator[Injector]:
    """Inject faults while the block runs: those given, or without any those of TORSH_FAULTS.

    An Engine passes all points by itself; loops of one's own call `events.reached("step", number)`, and
    `events.reached(name)` for points in a step.
    """
    chosen = [Fault.parse(one) if isinstance(one, str) else one for one in faults]
    log = os.environ.get(LOG_VARIABLE)
    injector = Injector(chosen or faults_from_environment(os.environ), log=None if log is None else Path(log))
    ending = injector.watch()
    try:
        yield injector
    finally:
        for end in ending:
            assert callable(end)
            end()


def _rank() -> int:
    """As the launcher numbered this process; ranks may be renumbered when others are lost."""
    text = os.environ.get("RANK")
    return max(0, events.current_rank()) if text is None else int(text)
