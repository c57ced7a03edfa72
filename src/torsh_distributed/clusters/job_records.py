"""What is remembered about a submitted job, so that any process of this user can ask for it later.

A job has a directory in the user's state directory ($TORSH_STATE_DIR, else $XDG_STATE_HOME/torsh, else
~/.local/state/torsh), for this user alone: its record, and what its engine keeps there (a script, the job's token, the
output of a job that runs on this machine). Environment variables of the ranks are not in the record: they may be
secrets.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torsh_distributed.clusters.submission import Submission
from torsh_distributed.errors import InvalidArgument, IoError, JobNotFound
from torsh_distributed.events.recorded import is_time
from torsh_distributed.private_files import make_private_directories, open_private, state_directory
from torsh_distributed.unreadable_data import unreadable_as

_LOOK_AGAIN_S = 0.25


class GrowingFile:
    """Whole lines of one file, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at_byte = 0
        self._rest = b""

    def take_lines(self) -> list[str]:
        """The lines that were completed since the last call. A file that shrank was replaced: it is read again."""
        try:
            size = self._path.stat().st_size
            if size < self._at_byte:
                self._at_byte, self._rest = 0, b""
            if size == self._at_byte:
                return []
            with self._path.open("rb") as file:
                file.seek(self._at_byte)
                data = file.read()
        except FileNotFoundError:
            return []
        self._at_byte += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def take_rest(self) -> list[str]:
        """The last line, if it has no end."""
        rest, self._rest = self._rest, b""
        return [rest.decode(errors="replace")] if rest else []


def read_growing(
    paths: Callable[[], Sequence[Path]], *, follow: bool, is_over: Callable[[], bool], interval_s: float = _LOOK_AGAIN_S
) -> Iterator[str]:
    """Lines of the files in the order they are seen; with `follow` until `is_over`, then what is left.

    `paths` is asked again each time: an engine may add files, such as one for each attempt. Polls: files of other nodes
    on a network file system send no events.
    """
    files: dict[Path, GrowingFile] = {}
    pause = threading.Event()
    while True:
        # Asked before reading: what was written before the end is then in what follows.
        is_last = not follow or is_over()
        num_lines = 0
        for path in paths():
            for line in files.setdefault(path, GrowingFile(path)).take_lines():
                num_lines += 1
                yield line
        if is_last:
            break
        if not num_lines:
            pause.wait(interval_s)
    for file in files.values():
        yield from file.take_rest()


_RECORD = "job.json"
_MAX_NAME_CHARS = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRecord:
    """A submitted job, as any later process finds it."""

    name: str
    """The job's name, by which `torsh logs`, `torsh cancel` and `torsh scale` take it."""

    engine: str
    """Which engine has it."""

    job_id: str
    """The engine's own id of it."""

    submitted_at_s: float
    """Wall-clock time."""

    nodes: int
    workers: int
    command: str
    """What every rank runs, for people."""

    directory: str
    """Where it was submitted from."""

    options: dict[str, str] = field(default_factory=dict)
    """The engine's own settings: which cluster, which namespace."""


def job_directory(name: str) -> Path:
    """The directory of the job of that name, created for this user alone; it may exist already."""
    require_job_name(name)
    try:
        return make_private_directories(state_directory(), "jobs", name)
    except OSError as error:
        raise IoError(
            "the job's directory cannot be made",
            hint="set TORSH_STATE_DIR to a directory of yours that the nodes of the cluster share",
            path=str(state_directory() / "jobs" / name),
            reason=error.strerror or str(error),
        ) from error


def require_job_name(name: str) -> None:
    """Raise InvalidArgument unless the name can be a directory, a run id and a name that engines show."""
    sound = name and len(name) <= _MAX_NAME_CHARS and all(char.isalnum() or char in "-_." for char in name)
    if not sound or name.startswith((".", "-")):
        raise InvalidArgument(
            "a job's name may hold letters, digits, '-', '_' and '.', and begins with none of '-' and '.'",
            hint="for example --name llama-1",
            name=name,
        )


def write_private(path: Path, text: str) -> None:
    """Replace the file by one with this text, for this user alone; readers see the old one or the new one, whole."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    fd = open_private(draft, os.O_WRONLY | os.O_TRUNC)
    with os.fdopen(fd, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def remember(
    submission: Submission, *, engine: str, job_id: str, found_at: Mapping[str, str] | None = None
) -> JobRecord:
    """Write down that the engine has taken the job, and where the engine is."""
    entry = submission.entry
    record = JobRecord(
        name=submission.name,
        engine=engine,
        job_id=job_id,
        submitted_at_s=time.time(),
        nodes=submission.nodes,
        workers=submission.num_workers,
        command=" ".join((entry.target, *entry.args)),
        directory=str(submission.working_dir),
        options={**submission.options, **(found_at or {})},
    )
    write_private(job_directory(submission.name) / _RECORD, json.dumps(asdict(record), indent=2) + "\n")
    return record


def forget(name: str) -> None:
    """Remove all that is remembered about the job; the job itself is left alone."""
    shutil.rmtree(job_directory(name))


def all_records() -> list[JobRecord]:
    """Every job remembered here, the oldest first. A record that cannot be read is an error that names it."""
    folder = state_directory() / "jobs"
    paths = folder.glob(f"*/{_RECORD}") if folder.is_dir() else ()
    return sorted((_read(path) for path in paths), key=lambda record: record.submitted_at_s)


def find_record(name: str) -> JobRecord:
    """The job of that name, or with that id at its engine; raises JobNotFound with the names there are."""
    records = all_records()
    found = [record for record in records if record.name == name] or [r for r in records if r.job_id == name]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(f"{record.name} ({record.engine})" for record in found)
        raise JobNotFound(f"several jobs have the id {name!r}", hint=f"give a name: {names}", job=name)
    known = ", ".join(record.name for record in records[-10:]) or "none"
    raise JobNotFound(
        f"no job named {name!r} was submitted by this user from here",
        hint=f"`torsh jobs` lists them; the latest: {known}",
        job=name,
        state_directory=str(state_directory()),
    )


def _read(path: Path) -> JobRecord:
    hint = f"remove the directory {path.parent} if the job is over"
    with unreadable_as(IoError, "the record of a job cannot be read", hint=hint, path=str(path)):
        fields: dict[str, Any] = json.loads(path.read_bytes())
        record = JobRecord(**fields)
        texts = (record.name, record.engine, record.job_id, record.command, record.directory)
        pairs = (*record.options, *record.options.values())
        if not all(isinstance(one, str) for one in (*texts, *pairs)) or record.name != path.parent.name:
            raise ValueError("its texts are not a job's")
        if not is_time(record.submitted_at_s) or not all(type(one) is int for one in (record.nodes, record.workers)):
            raise ValueError("its numbers are not a job's")
        return record
