"""The JSON-lines sink: whole lines, one file per rank, complete up to the last flush even after SIGKILL."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from torsh_distributed import events
from torsh_distributed.errors import IoError
from torsh_distributed.events import JsonlSink, LogEvent, StepEvent

WRITER = """
import os, signal, sys
from torsh_distributed import events
sink = events.JsonlSink(sys.argv[1], interval_s=0.05)
events.set_rank(3)
for step in range(1000):
    events.emit(events.StepEvent(step=step, duration_s=0.1))
{then}
"""


def records(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run_writer(directory: Path, then: str) -> int:
    return subprocess.run([sys.executable, "-c", WRITER.format(then=then), str(directory)]).returncode


def test_a_line_holds_time_rank_type_and_the_fields(tmp_path: Path) -> None:
    with JsonlSink(tmp_path) as sink:
        events.emit(StepEvent(step=7, duration_s=0.25, loss=1.5, rank=2))
        path = sink.path
    [record] = records(path)
    assert list(record)[:3] == ["time", "rank", "type"]
    assert (record["rank"], record["type"], record["step"], record["loss"]) == (2, "step", 7, 1.5)


def test_everything_is_there_after_a_normal_exit(tmp_path: Path) -> None:
    assert run_writer(tmp_path, "") == 0
    assert [record["step"] for record in records(tmp_path / "rank-3.jsonl")] == list(range(1000))


def test_what_was_flushed_survives_sigkill_as_whole_lines(tmp_path: Path) -> None:
    kill = """
sink.flush()
events.emit(events.LogEvent(level="info", message="after the flush"))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run_writer(tmp_path, kill) == -signal.SIGKILL
    text = (tmp_path / "rank-3.jsonl").read_text()
    assert text.endswith("\n")
    assert [json.loads(line)["step"] for line in text.splitlines()[:1000]] == list(range(1000))


def test_the_background_flush_needs_no_call(tmp_path: Path) -> None:
    wait = """
import pathlib, time
deadline = time.monotonic() + 20
path = pathlib.Path(sys.argv[1]) / "rank-3.jsonl"
while time.monotonic() < deadline and (not path.exists() or path.read_text().count("\\n") < 1000):
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run_writer(tmp_path, wait) == -signal.SIGKILL
    assert len(records(tmp_path / "rank-3.jsonl")) == 1000


def test_appending_keeps_what_an_earlier_attempt_wrote(tmp_path: Path) -> None:
    run_writer(tmp_path, "")
    run_writer(tmp_path, "")
    assert len(records(tmp_path / "rank-3.jsonl")) == 2000


def test_a_closed_sink_takes_no_more(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    sink.close()
    sink.close()
    events.emit(LogEvent(level="info", message="late"))
    assert list(tmp_path.iterdir()) == []


def test_an_unusable_directory_is_refused_with_the_variable_to_set(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(IoError, match="TORSH_EVENTS_DIR"):
        JsonlSink(tmp_path / "file" / "events")


def test_a_full_disk_is_reported_once_and_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = JsonlSink(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # no file may grow: each write fails, as on a full disk
    try:
        for _ in range(2):
            events.emit(LogEvent(level="info", message="a"))
            sink.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    sink.close()
    assert caplog.text.count("events are being lost") == 1


def test_events_are_for_this_user_alone_and_never_written_through_a_link(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    with JsonlSink(tmp_path / "events") as sink:
        events.emit(LogEvent(level="info", message="a"))
        sink.flush()
        assert sink.path.stat().st_mode & 0o777 == 0o600
        sink.path.unlink()
        sink.path.symlink_to(victim)
        events.emit(LogEvent(level="info", message="b"))
    assert victim.read_text() == "untouched"
    assert caplog.text.count("events are being lost") == 1
