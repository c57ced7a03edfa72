from __future__ import annotations

import io
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torsh_distributed.errors import IoError
from torsh_distributed.launch.local.output import LinePrefix, LineSplitter, OutputPump, open_log, wants_colour
from torsh_distributed.launch.local.terminal import StreamName, Terminal


def split(*chunks: bytes) -> list[bytes]:
    splitter = LineSplitter()
    return [line for chunk in chunks for line in splitter.feed(chunk)] + splitter.finish()


def test_lines_end_at_newlines_and_carriage_returns() -> None:
    assert split(b"a\nb\r\n\nc") == [b"a", b"b", b"", b"c"]
    assert split(b"\r 10%|\r 20%|\n") == [b" 10%|", b" 20%|"]
    assert split(b"a\r", b"\nb") == [b"a", b"b"]
    assert split(b"a\r") == [b"a"]


@given(text=st.binary(max_size=200), cuts=st.lists(st.integers(0, 200), max_size=6))
def test_lines_do_not_depend_on_how_the_stream_is_cut(text: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    chunks = [text[start:end] for start, end in itertools.pairwise(edges)]
    assert split(*chunks) == split(text)
    kept = b"".join(split(text))
    assert kept == text.replace(b"\r", b"").replace(b"\n", b"")


def test_a_line_without_end_does_not_fill_the_memory() -> None:
    splitter = LineSplitter()
    lines = [line for _ in range(100) for line in splitter.feed(b"x" * 10_000)] + splitter.finish()
    assert b"".join(lines) == b"x" * 1_000_000
    assert max(map(len, lines)) <= 65536


def test_the_prefix_lines_up_ranks_and_ends_foreign_colours() -> None:
    assert LinePrefix(3, 2, False).apply(b"hi") == b"[rank  3] hi\n"
    assert LinePrefix(0, 1, True).apply(b"hi") == b"\x1b[36m[rank 0]\x1b[0m hi\n"
    assert LinePrefix(0, 1, True).apply(b"\x1b[31mred").endswith(b"red\x1b[0m\n")
    assert LinePrefix(3, 1, False).apply(b"\x1b]0;owned\x07") == b"[rank 3] \\x1b]0;owned\\x07\n"
    assert LinePrefix(3, 1, False, is_raw=True).apply(b"\x1b]0;owned\x07") == b"[rank 3] \x1b]0;owned\x07\n"


def test_colour_is_for_terminals_that_did_not_refuse_it() -> None:
    assert wants_colour(is_tty=True, environ={"TERM": "xterm"})
    assert not wants_colour(is_tty=False, environ={"TERM": "xterm"})
    assert not wants_colour(is_tty=True, environ={"TERM": "xterm", "NO_COLOR": "1"})
    assert not wants_colour(is_tty=True, environ={"TERM": "dumb"})


class Bench:
    """A pump whose terminal is two pipes, and workers that are pipes too."""

    def __init__(self) -> None:
        self.out_read, self.out_write = os.pipe()
        self.err_read, self.err_write = os.pipe()
        self.warnings: list[str] = []
        self.terminal = Terminal(out_fd=self.out_write, err_fd=self.err_write)
        self.pump = OutputPump(self.terminal, warn=self.warnings.append)

    def close(self) -> None:
        self.pump.close()
        self.terminal.close()
        for fd in (self.out_read, self.out_write, self.err_read, self.err_write):
            os.close(fd)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def test_both_streams_are_shown_and_kept_and_the_end_of_stderr_remembered(bench: Bench, tmp_path: Path) -> None:
    out, worker_out = os.pipe()
    err, worker_err = os.pipe()
    prefix = LinePrefix(1, 1, False)
    bench.pump.add(1, "stdout", out, prefix=prefix, log=open_log(tmp_path / "new", 1, "stdout"))
    bench.pump.add(1, "stderr", err, prefix=prefix, log=open_log(tmp_path / "new", 1, "stderr"))
    os.write(worker_out, b"one\ntwo")
    os.write(worker_err, b"".join(b"error %d\n" % number for number in range(30)))
    os.close(worker_out)
    os.close(worker_err)
    assert bench.pump.wait_ended({1}, timeout_s=10)
    bench.terminal.close()  # the pump hands its lines to the terminal's thread: written once that has ended
    assert os.read(bench.out_read, 1000) == b"[rank 1] one\n[rank 1] two\n"
    assert os.read(bench.err_read, 1000).startswith(b"[rank 1] error 0\n")
    assert (tmp_path / "new" / "rank-1.stdout.log").read_bytes() == b"one\ntwo"
    assert bench.pump.tail(1)[-1] == "error 29"
    assert bench.pump.tail(0) == ()


def test_a_hidden_rank_is_kept_but_not_shown(bench: Bench, tmp_path: Path) -> None:
    out, worker_out = os.pipe()
    bench.pump.add(0, "stdout", out, prefix=None, log=open_log(tmp_path, 0, "stdout"))
    os.write(worker_out, b"quiet\n")
    os.close(worker_out)
    assert bench.pump.wait_ended({0}, timeout_s=10)
    bench.terminal.close()
    os.set_blocking(bench.out_read, False)
    with pytest.raises(BlockingIOError):
        os.read(bench.out_read, 1)
    assert (tmp_path / "rank-0.stdout.log").read_bytes() == b"quiet\n"


def test_a_note_that_comes_with_the_end_is_in_the_log(tmp_path: Path) -> None:
    """The pump is busy with a line while the note comes and the end is asked for: its next look is its last."""
    is_writing, may_go_on = threading.Event(), threading.Event()

    class SlowTerminal(Terminal):
        def write(self, name: StreamName, data: bytes) -> None:
            is_writing.set()
            assert may_go_on.wait(10)

    null = os.open(os.devnull, os.O_WRONLY)
    terminal = SlowTerminal(out_fd=null, err_fd=null)
    pump = OutputPump(terminal, warn=pytest.fail)
    err, worker_err = os.pipe()
    pump.add(0, "stderr", err, prefix=LinePrefix(0, 1, False), log=open_log(tmp_path, 0, "stderr"))
    os.write(worker_err, b"line\n")
    assert is_writing.wait(10)
    pump.note(0, "Traceback", is_shown=False)
    release = threading.Timer(0.15, may_go_on.set)
    release.start()
    pump.close(timeout_s=0.1)
    release.join()
    pump._thread.join(10)  # close waits for it no longer than it may
    terminal.close()
    for fd in (null, worker_err):
        os.close(fd)
    assert (tmp_path / "rank-0.stderr.log").read_text() == "line\nTraceback"


def test_a_pipe_that_someone_still_holds_does_not_hold_up_the_end(bench: Bench) -> None:
    out, worker_out = os.pipe()
    bench.pump.add(0, "stdout", out, prefix=LinePrefix(0, 1, False), log=None)
    os.write(worker_out, b"last words")
    assert not bench.pump.wait_ended({0}, timeout_s=0.05)
    bench.pump.close(timeout_s=0.3)
    assert os.read(bench.out_read, 100) == b"[rank 0] last words\n"
    os.close(worker_out)


def test_a_full_disk_is_said_and_the_rest_is_still_shown(bench: Bench) -> None:
    out, worker_out = os.pipe()
    bench.pump.add(0, "stdout", out, prefix=LinePrefix(0, 1, False), log=io.FileIO("/dev/full", "wb"))
    os.write(worker_out, b"line\n")
    os.close(worker_out)
    assert bench.pump.wait_ended({0}, timeout_s=10)
    assert os.read(bench.out_read, 100) == b"[rank 0] line\n"
    assert "No space left" in bench.warnings[0]


def test_a_log_is_for_this_user_alone_and_never_written_through_a_link(tmp_path: Path) -> None:
    directory = tmp_path / "logs" / "run" / "attempt-0"
    open_log(directory, 0, "stdout").close()
    assert (directory / "rank-0.stdout.log").stat().st_mode & 0o777 == 0o600
    assert directory.stat().st_mode & 0o777 == 0o700
    (directory / "rank-1.stdout.log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(IoError, match="log directory cannot be written"):
        open_log(directory, 1, "stdout")
    assert not (tmp_path / "elsewhere").exists()


INTERRUPTED = """\
before
Traceback (most recent call last):
  File "train.py", line 1, in <module>
    import torch
  File "torch/__init__.py", line 9, in <module>
KeyboardInterrupt

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 2, in <module>
ImportError: cannot load
between
Traceback (most recent call last):
  File "train.py", line 3, in save
ValueError: no space

Exception ignored in: <module 'threading'>
Traceback (most recent call last):
  File "threading.py", line 4, in _shutdown
KeyboardInterrupt:
after
KeyboardInterrupt
Traceback (most recent call last):
  File "train.py", line 5, in <module>
KeyboardInterrupt
"""
SHOWN = """\
before
between
Traceback (most recent call last):
  File "train.py", line 3, in save
ValueError: no space

after
"""


def test_after_an_interrupt_its_tracebacks_are_not_shown_and_all_else_is(bench: Bench, tmp_path: Path) -> None:
    err, worker_err = os.pipe()
    bench.pump.hide_interrupts()
    bench.pump.add(0, "stderr", err, prefix=LinePrefix(0, 1, False), log=open_log(tmp_path, 0, "stderr"))
    os.write(worker_err, INTERRUPTED.encode())
    os.close(worker_err)
    assert bench.pump.wait_ended({0}, timeout_s=10)
    bench.terminal.close()
    assert os.read(bench.err_read, 10_000).decode().replace("[rank 0] ", "") == SHOWN
    assert (tmp_path / "rank-0.stderr.log").read_text() == INTERRUPTED


def test_a_log_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(IoError, match="log directory cannot be written"):
        open_log(tmp_path / "file" / "logs", 0, "stdout")
    with pytest.raises(IoError, match="log directory cannot be written"):
        open_log(Path("/proc/no/logs"), 0, "stdout")
