from __future__ import annotations

import fcntl
import os
import pty
import threading

from torsh_distributed.launch.local.failure_report import LauncherOutput
from torsh_distributed.launch.local.terminal import Terminal


def read_all(fd: int) -> bytes:
    data = b""
    while piece := os.read(fd, 65536):
        data += piece
    return data


def test_what_is_queued_comes_out_in_order_on_its_stream() -> None:
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    with Terminal(out_fd=out_write, err_fd=err_write) as terminal:
        for number in range(100):
            terminal.write("stdout", b"%d\n" % number)
        terminal.post("stderr", b"oops\n")
    os.close(out_write)
    os.close(err_write)
    assert read_all(out_read) == b"".join(b"%d\n" % number for number in range(100))
    assert read_all(err_read) == b"oops\n"
    os.close(out_read)
    os.close(err_read)


def test_a_reader_that_left_is_mentioned_once_on_the_other_stream() -> None:
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    os.close(out_read)
    with Terminal(out_fd=out_write, err_fd=err_write) as terminal:
        for _ in range(3):
            terminal.write("stdout", b"line\n")
    os.close(out_write)
    os.close(err_write)
    assert read_all(err_read) == b"torsh run: stdout is no longer shown: Broken pipe\n"
    os.close(err_read)


def test_nobody_at_either_end_ends_quietly() -> None:
    out_read, out_write = os.pipe()
    os.close(out_read)
    with Terminal(out_fd=out_write, err_fd=out_write) as terminal:
        terminal.post("stdout", b"line\n")
    assert not any(thread.name == "torsh-terminal" for thread in threading.enumerate())
    os.close(out_write)


def test_a_reader_that_does_not_read_holds_up_writers_but_not_the_launcher() -> None:
    read, write = os.pipe()
    capacity = fcntl.fcntl(write, fcntl.F_GETPIPE_SZ)
    terminal = Terminal(out_fd=write, err_fd=write)
    wrote = threading.Event()

    def flood() -> None:
        for _ in range(4):
            terminal.write("stdout", b"x" * (1 << 20))
        wrote.set()

    worker = threading.Thread(target=flood)
    worker.start()
    assert not wrote.wait(0.1)
    # The launcher's own words never wait, and leaving waits no longer than it says.
    LauncherOutput(terminal).say("still in command")
    assert not wrote.is_set()
    drained = threading.Thread(target=lambda: drain(read, 4 * (1 << 20) + len("torsh run: still in command\n")))
    drained.start()
    worker.join(10)
    drained.join(10)
    assert wrote.is_set()
    terminal.close()
    assert capacity < 1 << 20
    os.close(read)
    os.close(write)


def drain(fd: int, num_bytes: int) -> None:
    while num_bytes > 0:
        num_bytes -= len(os.read(fd, 65536))


def test_a_non_blocking_terminal_loses_nothing() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    data = bytes(range(256)) * 2000
    received = bytearray()
    terminal = Terminal(out_fd=write, err_fd=write)
    terminal.write("stdout", data)
    while len(received) < len(data):
        received += os.read(read, 65536)
    terminal.close()
    assert received == data
    os.close(read)
    os.close(write)


def test_a_pseudo_terminal_is_one_and_a_pipe_is_not() -> None:
    ours, theirs = pty.openpty()
    read, write = os.pipe()
    with Terminal(out_fd=theirs, err_fd=write) as terminal:
        assert terminal.is_tty("stdout")
        assert not terminal.is_tty("stderr")
    for fd in (ours, theirs, read, write):
        os.close(fd)
