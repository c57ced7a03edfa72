"""What the kernel says about a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.lab.network import Lab
from torsh_distributed.launch.worker.native_state import (
    CpuLook,
    catches_signal,
    look_at_cpu,
    read_native_state,
    unanswered_peers,
)


def test_a_process_that_reads_a_pipe_is_seen_with_what_it_reads() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        for _ in range(2000):
            state = read_native_state(child.pid)
            if state is not None and state.state == "S" and state.call == "read" and "pipe" in (state.target or ""):
                break
        else:
            raise AssertionError(f"{state}")
        assert state.text.startswith("sleeps in read of pipe:[")
        os.kill(child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        stopped = read_native_state(child.pid)
        assert stopped is not None
        assert stopped.text.startswith("is stopped")
        child.kill()
    assert read_native_state(child.pid) is None


def test_load_is_cpu_time_over_wall_time() -> None:
    assert CpuLook(1.0, 10.0).share_until(CpuLook(1.5, 11.0)) == 0.5
    assert CpuLook(1.0, 10.0).share_until(CpuLook(1.0, 10.01)) is None, "too close to tell"
    assert look_at_cpu(os.getpid()) is not None


def test_only_handlers_count_as_catching() -> None:
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        assert catches_signal(os.getpid(), signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        assert not catches_signal(os.getpid(), signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)


SENDER = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as sock:
    print("connected", flush=True)
    sys.stdin.readline()
    sock.sendall(b"is anybody there?")
    sock.recv(1)
"""


@pytest.mark.needs_netns
@pytest.mark.ranks
def test_a_peer_behind_a_dead_link_is_named(lab: Lab) -> None:
    here, there = lab.hosts(2)
    server = there.popen(
        [sys.executable, "-c", "import socket; s = socket.create_server(('', 4711)); c = s.accept(); s.accept()"]
    )
    command = [sys.executable, "-c", SENDER, there.address, "4711"]
    sender = None
    try:
        deadline = time.monotonic() + 30
        while sender is None or sender.poll() is not None:  # until the server listens
            assert time.monotonic() < deadline
            sender = here.popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            assert sender.stdout is not None
            if not sender.stdout.readline():
                sender.wait()
        assert unanswered_peers(sender.pid) == ()
        there.link_down()
        assert sender.stdin is not None
        sender.stdin.write("\n")
        sender.stdin.flush()
        while not (found := unanswered_peers(sender.pid)):
            assert time.monotonic() < deadline, "nothing was sent again"
            time.sleep(0.05)
        assert found == (f"{there.address}:4711",)
        state = read_native_state(sender.pid)
        assert state is not None
        assert state.text.endswith(f"no answer from {there.address}:4711")
    finally:
        for process in filter(None, (sender, server)):
            process.kill()
            process.communicate()
