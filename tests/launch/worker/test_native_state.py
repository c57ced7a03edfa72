"""What the kernel says about a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from torsh_distributed.launch.worker.native_state import (
    CpuLook,
    catches_signal,
    look_at_cpu,
    read_native_state,
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
