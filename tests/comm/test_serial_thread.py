"""Callables on one thread: their order, their results, the ends of the thread."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest

from torsh_distributed.comm.serial_thread import SerialThread
from torsh_distributed.errors import CommunicationError, OperationTimeout

LIMIT_S = 20.0


def test_callables_run_in_order_on_one_thread() -> None:
    thread = SerialThread("torsh-test")
    order: list[int] = []
    futures = [thread.submit(order.append, number) for number in range(100)]
    names = {thread.submit(lambda: threading.current_thread().name).result(LIMIT_S) for _ in range(3)}
    assert all(future.done() for future in futures)
    assert order == list(range(100))
    assert names == {"torsh-test"}
    thread.close(LIMIT_S)


def test_what_a_callable_raises_reaches_the_future_alone() -> None:
    thread = SerialThread("torsh-test")
    failed = thread.submit(int, "no number")
    assert thread.submit(int, "7").result(LIMIT_S) == 7
    with pytest.raises(ValueError, match="no number"):
        failed.result(LIMIT_S)
    thread.close(LIMIT_S)


def test_closing_waits_for_what_was_submitted_and_then_refuses() -> None:
    thread = SerialThread("torsh-test")
    may_end = threading.Event()
    work = thread.submit(may_end.wait, LIMIT_S)
    with pytest.raises(OperationTimeout, match="torsh-test did not end within"):
        thread.close(0.01)
    may_end.set()
    thread.close(LIMIT_S)
    assert work.result(0) is True
    with pytest.raises(CommunicationError, match="was closed"):
        thread.submit(print)


def test_a_thread_that_nobody_refers_to_ends() -> None:
    thread = SerialThread("torsh-forgotten")
    running = thread.submit(threading.current_thread).result(LIMIT_S)
    del thread
    gc.collect()
    running.join(LIMIT_S)
    assert not running.is_alive()


SCRIPT = """
import os
from torsh_distributed.comm.serial_thread import SerialThread

thread = SerialThread("torsh-test")
assert thread.submit(int, "1").result(20) == 1
child = os.fork()
assert thread.submit(int, "2").result(20) == 2
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.ranks
def test_a_forked_child_starts_a_thread_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


AT_EXIT = """
import atexit, threading
atexit.register(lambda: print([one.name for one in threading.enumerate()]))  # runs last
from torsh_distributed.comm.serial_thread import SerialThread

thread = SerialThread("torsh-test")
thread.submit(print, "done")
"""


@pytest.mark.ranks
def test_what_was_submitted_is_done_and_the_thread_has_ended_when_the_process_exits() -> None:
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("done\n['MainThread']\n", "")
