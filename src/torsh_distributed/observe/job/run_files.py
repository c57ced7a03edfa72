"""A job from its event files (TORSH_EVENTS_DIR): of a run that has ended, or of one that still writes them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from torsh_distributed import events
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.events.recorded import event_of, record_in
from torsh_distributed.observe.job.job_view import JobView
from torsh_distributed.observe.metrics.rank_collector import RankCollector
from torsh_distributed.observe.metrics.rank_reporter import summary_packet

_RANK_FILE = re.compile(r"rank-(\d{1,6})(\.older)?\.jsonl")
_LAUNCHER_FILE = re.compile(r"launcher-\d+\.jsonl")
_READ_BYTES = 1 << 22
_OF_THE_JOB = (
    events.EnergyEvent | events.CarbonEvent | events.ScheduleEvent | events.BudgetEvent | events.FederatedRoundEvent
)
"""Events that are about no rank."""
_STEPS_A_PACKET = 100


class _EventFile:
    """One file, read as far as it has whole lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Any]:
        """The records since the last call, at most some megabytes of them; None for a line that is not a record."""
        with self._path.open("rb") as file:
            if self._offset > os.fstat(file.fileno()).st_size:
                self._offset = 0  # it was set aside, and started again
            file.seek(self._offset)
            data = file.read(_READ_BYTES)
        end = data.rfind(b"\n") + 1
        self._offset += end
        return [record_in(line) for line in data[:end].splitlines()]


class _Replay:
    """The events of one rank, collected as they were when it ran."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.collector = RankCollector()
        self.facts: dict[str, Any] = {}
        self._sequence = 0
        self._clock = 0.0
        self._time = 0.0

    def take(self, event: events.Event) -> None:
        self._time = event.time
        if isinstance(event, events.PhaseEvent | events.WaitEvent | events.CollectiveEvent):
            self._clock = event.time - (event.start_s + event.duration_s)
        self.collector.take(event, now_s=event.time - self._clock)

    def packet(self) -> dict[str, Any]:
        self._sequence += 1
        return summary_packet(
            self.collector,
            rank=self.rank,
            sequence=self._sequence,
            time=self._time,
            clock=self._clock,
            facts=self.facts,
        )


class EventFiles:
    """The files of a directory, fed into a JobView; call `poll` again for what was written since."""

    def __init__(self, directory: str | Path, view: JobView | None = None) -> None:
        self.view = view if view is not None else JobView()
        given = Path(directory)
        # What `torsh run --trace` writes has the events beside the trace.
        self._directory = given / "events" if (given / "events").is_dir() else given
        if not self._directory.is_dir():
            raise InvalidArgument(
                "there is no such directory of event files",
                hint="run the job with TORSH_EVENTS_DIR=DIRECTORY, or observe.events_dir in its plan",
                directory=str(directory),
            )
        self._files: dict[str, _EventFile] = {}
        self._ranks: dict[int, _Replay] = {}
        self._has_started = False
        self.view.header.run_id = given.name

    def poll(self) -> bool:
        """Read what is new; whether there was anything. Files that do not belong here are left alone."""
        is_new, is_first = False, not self._files
        # What was set aside, because a file was full, is older than what follows; later it was read already.
        for path in sorted(self._directory.iterdir(), key=lambda one: (".older" not in one.name, one.name)):
            of_rank = _RANK_FILE.fullmatch(path.name)
            if of_rank is None and _LAUNCHER_FILE.fullmatch(path.name) is None:
                continue
            if of_rank is not None and of_rank[2] and not is_first and path.name not in self._files:
                continue
            if not path.is_file():  # a pipe would be waited for
                continue
            records = self._files.setdefault(path.name, _EventFile(path)).read()
            is_new = is_new or bool(records)
            if of_rank is not None:
                self._take_rank(int(of_rank[1]), records)
            else:
                self._take_launcher(records)
        return is_new

    def read_all(self) -> JobView:
        """Read until nothing is new. Raises InvalidArgument if the directory has no event files."""
        while self.poll():
            continue
        if not self._files:
            raise InvalidArgument(
                "there are no event files in this directory",
                hint="run the job with TORSH_EVENTS_DIR=DIRECTORY or `torsh run --trace DIRECTORY`, and give that one",
                directory=str(self._directory),
            )
        return self.view

    def _take_rank(self, rank: int, records: list[Any]) -> None:
        replay = self._ranks.setdefault(rank, _Replay(rank))
        num_steps = 0
        for record in records:
            event = event_of(record)
            if event is None:
                self.view.num_dropped += 1
                continue
            self._note_start(event)
            if isinstance(event, _OF_THE_JOB):  # of a rank without our launcher
                self.view.take(record)
                continue
            if isinstance(event, events.MemoryEvent | events.HardwareEvent):
                self.view.take_sample(event)
            replay.take(event)
            num_steps += isinstance(event, events.StepEvent)
            if isinstance(event, events.MembershipEvent) and event.action == "joined":
                replay.facts["world_size"] = event.world_size
                self.view.header.world_size = event.world_size
            if num_steps >= _STEPS_A_PACKET:
                num_steps = 0
                self.view.take(replay.packet())
        if records:
            self.view.take(replay.packet())

    def _take_launcher(self, records: list[Any]) -> None:
        for record in records:
            event = event_of(record)
            if isinstance(event, events.AlertEvent):
                self.view.incidents.append(events.to_record(event))
            if isinstance(event, _OF_THE_JOB):
                self.view.take(record)
            if isinstance(event, events.FederatedRoundEvent):
                self._note_start(event)
            if not isinstance(event, events.MembershipEvent):
                continue
            self._note_start(event)
            code = re.search(r"exit code (\d+)", event.detail or "")
            told = {"action": event.action, "attempt": event.attempt, "detail": event.detail, "time": event.time}
            self.view.take({"type": "membership", **told, "exit_code": int(code[1]) if code else None})
            self.view.header.world_size = event.world_size
            if event.action == "ended":
                self.view.header.ended = event.time

    def _note_start(self, event: events.Event) -> None:
        if not self._has_started or event.time < self.view.header.started:
            self._has_started = True
            self.view.header.started = event.time
