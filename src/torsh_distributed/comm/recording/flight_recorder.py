"""The flight recorder: the last thousand operations of this process, cheap enough to be always on.

When a job hangs, the question is which rank is behind, in which call, on which line. The answer must be there already.
Operations of `td.*` are recorded on every backend, calls of `torch.distributed` on our backends.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType

from typing_extensions import override

from torsh_distributed import events

CAPACITY = 1000
_now_s = time.monotonic
_thread = threading.get_ident
_OURS = str(Path(__file__).parents[2])


_BACKWARD = "_engine_run_backward"
_TORCH_DISTRIBUTED = f"{os.sep}torch{os.sep}distributed{os.sep}"


class _LibraryFiles(dict[str, bool]):
    """Whether a file, by its name, is part of this library or of torch.distributed, or wraps one that is deprecated."""

    def __missing__(self, name: str) -> bool:
        is_library = name.startswith(_OURS) or _TORCH_DISTRIBUTED in name or name.endswith("typing_extensions.py")
        return self.setdefault(name, is_library)


_is_library = _LibraryFiles()


class _ThreadState(threading.local):
    """Whether this thread is inside an operation that has been recorded: its messages are part of it."""

    is_inside = False


in_thread = _ThreadState()


class OperationRecord:
    """One operation: what, from where, when. `end_s` is None while it is under way.

    A brief one (`is_brief`) has neither times nor call site: see `BriefRecord`. A call of torch's (`is_by_torch`) has
    the number that its group gave it; the others are numbered by the recorder. `thread` is the one that called.
    """

    __slots__ = (
        "_at",
        "_code",
        "end_s",
        "error",
        "group",
        "is_brief",
        "is_by_torch",
        "num_bytes",
        "op",
        "peer",
        "sequence",
        "start_s",
        "thread",
    )

    def __init__(
        self, op: str, group: str, sequence: int, num_bytes: int, peer: int | None, code: CodeType | None, at: int
    ) -> None:
        self.op = op
        self.group = group
        self.sequence = sequence
        self.num_bytes = num_bytes
        self.peer = peer
        self._code = code
        self._at = at
        self.is_brief = False
        self.is_by_torch = False
        self.error: str | None = None
        self.end_s: float | None = None
        self.thread = _thread()
        self.start_s = _now_s()

    @property
    def call_site(self) -> str | None:
        """file:line of the caller outside this library."""
        if self._code is None:
            return None
        # Computed on demand: finding the line of an instruction takes as long as a small collective.
        line = next((line for start, end, line in self._code.co_lines() if start <= self._at < end), None)
        return f"{self._code.co_filename}:{line}"

    @property
    def is_in_backward(self) -> bool:
        """Whether torch's autograd started it, as for DDP's buckets."""
        return self._code is not None and self._code.co_name == _BACKWARD

    @property
    def duration_s(self) -> float | None:
        """Seconds from call to end; None while under way."""
        return None if self.end_s is None else self.end_s - self.start_s

    @override
    def __repr__(self) -> str:
        if self.is_brief:
            return f"<{self.op} #{self.sequence} on {self.group}, {self.num_bytes} bytes, by torch>"
        took = "under way" if self.end_s is None else f"{self.end_s - self.start_s:.6f} s"
        return f"<{self.op} #{self.sequence} on {self.group}, {self.num_bytes} bytes, {took}, at {self.call_site}>"


BriefRecord = tuple[str, str, int, int]
"""A call of torch's on the short path, which takes 12 µs in all: operation, group, the group's own number of the call,
bytes. Times and call site would take another 2 µs; of a call that is stuck, the thread's stack shows where."""


class FlightRecorder:
    """A ring of the last CAPACITY operations and the sequence number of each group."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        # Appending to a deque and advancing a count are atomic, so collectives need no lock.
        self._ring: deque[OperationRecord | BriefRecord] = deque(maxlen=capacity)
        self._sequences: defaultdict[str, Iterator[int]] = defaultdict(lambda: itertools.count(1))
        self.note_briefly: Callable[[BriefRecord], None] = self._ring.append

    def begin(
        self, op: str, group: str, num_bytes: int, peer: int | None = None, *, sequence: int | None = None
    ) -> OperationRecord:
        """Record that an operation starts; the caller's file and line are found on the stack.

        `sequence` is the number of a call that its group has numbered. Operations of `td.*` are numbered here, equally
        on all ranks, because these numbers are compared between ranks.
        """
        frame = sys._getframe(1)
        while _is_library[frame.f_code.co_filename] and frame.f_back is not None:
            frame = frame.f_back
        number = next(self._sequences[group]) if sequence is None else sequence
        record = OperationRecord(op, group, number, num_bytes, peer, frame.f_code, frame.f_lasti)
        if sequence is not None:
            record.is_by_torch = True
        self._ring.append(record)
        return record

    def end_quietly(self, record: OperationRecord, error: BaseException | None = None) -> None:
        """Record that it ended, without an event: calls of torch's own functions are in no statistics."""
        record.end_s = _now_s()
        if error is not None:
            record.error = f"{type(error).__name__}: {error}"

    def end(self, record: OperationRecord, error: BaseException | None = None) -> None:
        """Record that it ended, and emit a CollectiveEvent if anything subscribes to it."""
        self.end_quietly(record, error)
        assert record.end_s is not None, "it has just ended"
        if events.wanted(events.CollectiveEvent):
            events.emit(
                events.CollectiveEvent(
                    op=record.op,
                    group=record.group,
                    sequence=record.sequence,
                    num_bytes=record.num_bytes,
                    start_s=record.start_s,
                    duration_s=record.end_s - record.start_s,
                    peer=record.peer,
                    call_site=record.call_site,
                    error=record.error,
                )
            )

    def __iter__(self) -> Iterator[OperationRecord]:
        """The records, oldest first."""
        return map(_as_record, list(self._ring))

    def timed(self) -> Iterator[OperationRecord]:
        """The records that have times, newest first."""
        return (entry for entry in reversed(list(self._ring)) if isinstance(entry, OperationRecord))

    @property
    def newest(self) -> OperationRecord | BriefRecord | None:
        """The latest entry as it is kept, to see whether anything happened."""
        return self._ring[-1] if self._ring else None

    def last(self, group: str) -> OperationRecord | None:
        """The newest record of a group."""
        newest = self.newest
        if newest is not None and _group_of(newest) == group:  # nearly always: no copy of the ring
            return _as_record(newest)
        found = next((entry for entry in reversed(list(self._ring)) if _group_of(entry) == group), None)
        return None if found is None else _as_record(found)


def _group_of(entry: OperationRecord | BriefRecord) -> str:
    return entry.group if isinstance(entry, OperationRecord) else entry[1]


def _as_record(entry: OperationRecord | BriefRecord) -> OperationRecord:
    if isinstance(entry, OperationRecord):
        return entry
    record = OperationRecord(*entry, peer=None, code=None, at=0)
    record.is_brief, record.is_by_torch, record.start_s = True, True, math.nan
    return record


recorder = FlightRecorder()
"""The recorder of this process: part of the process-group registry, because a process has one history."""
