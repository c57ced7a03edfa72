"""A test must leave the process as it found it: no environment variable, thread or process may stay behind.

Why: such leftovers make *other* tests fail later. Processes are found as children of this one and, when orphaned,
by a token that every test puts into the environment of the processes it starts, or below the nursery of programs.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bed.warm_programs import NURSERY
from tests.bed.world import ZYGOTES

TOKEN = "TORSH_TEST_TOKEN"
# Pytest sets the second for every phase of a test; torch sets the third when it first imports its compiler; matplotlib
# sets the last where it cannot write to HOME.
_NOT_OF_TESTS = frozenset(
    {
        *(TOKEN, "PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "PYTORCH_NVML_BASED_CUDA_CHECK", "MPLCONFIGDIR"),
        *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),  # the import of scikit-learn sets them, for transformers
    }
)
_GRACE_S = 3.0
KEPT: set[int] = set()
"""Daemons of fixtures that live as long as the session."""
_numbers = itertools.count()


def _children(pid: int | str = "self") -> set[int]:
    pids: set[int] = set()
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            pids.update(map(int, (task / "children").read_text().split()))
    except (FileNotFoundError, ProcessLookupError):
        return pids  # the thread or the process has ended meanwhile
    return pids


def _of_programs() -> set[int]:
    """Forked programs with all that they have started: their environment is that of the nursery, without a token."""
    found: set[int] = set()
    below = set() if NURSERY.process is None else _children(NURSERY.process.pid)
    while below:
        found |= below
        below = set().union(*map(_children, below))
    return found


def _read(pid: int, name: str) -> bytes:
    """A file of a process; empty if the process is gone or belongs to another user."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""


def _pids() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}  # noqa: PTH208  # once per test: 20 times quicker


def _bearers(token: str, before: set[int]) -> set[int]:
    entry = f"{TOKEN}={token}".encode()
    return {pid for pid in _pids() - before if entry in _read(pid, "environ").split(b"\0")}


def _is_kept(pid: int) -> bool:
    """The bed's zygote, daemons of the session and Python's shared-memory tracker live as long as this process."""
    is_ours = pid in ZYGOTES or pid in KEPT or (NURSERY.process is not None and pid == NURSERY.process.pid)
    return is_ours or b"multiprocessing.resource_tracker" in _read(pid, "cmdline")


def _leftover_processes(before: set[int], token: str) -> set[int]:
    return {pid for pid in (_children() | _of_programs()) - before | _bearers(token, before) if not _is_kept(pid)}


def _describe_process(pid: int) -> str:
    command = _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
    return f"process {pid}: {command or 'ended, but nobody waited for it'}"


def _end(pid: int) -> None:
    """Kill what was left and reap it if it is a child, so the next test starts clean."""
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        return


def _leftover_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    # Dummy threads represent native ones that once called into Python; they cannot be joined. tqdm keeps one thread for
    # the process from its first bar on, whichever test a library draws that in.
    found = [thread for thread in threading.enumerate() if thread not in before and thread.name != "tqdm_monitor"]
    return [thread for thread in found if not isinstance(thread, threading._DummyThread)]


def _restore_environment(before: dict[str, str]) -> list[str]:
    """Restore the variables; returns what had changed."""
    changes = []
    for name in sorted((before.keys() | os.environ.keys()) - _NOT_OF_TESTS):
        old, new = before.get(name), os.environ.get(name)
        if old == new:
            continue
        changes.append(f"environment variable {name}: {old!r} became {new!r}")
        if old is None:
            del os.environ[name]
        else:
            os.environ[name] = old
    return changes


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fail a test that leaves something behind; what is about to end gets a moment to finish."""
    token, outer_token = f"{os.getpid()}-{next(_numbers)}", os.environ.get(TOKEN)
    os.environ[TOKEN] = token
    environment, threads, running = dict(os.environ), set(threading.enumerate()), _pids()
    yield
    if outer_token is None:
        del os.environ[TOKEN]
    else:
        os.environ[TOKEN] = outer_token
    left = _restore_environment(environment)
    deadline = time.monotonic() + _GRACE_S
    while processes := _leftover_processes(running, token):
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    for thread in _leftover_threads(threads):
        thread.join(max(0.0, deadline - time.monotonic()))
    left += [f"thread {thread.name!r}" for thread in _leftover_threads(threads)]
    left += [_describe_process(pid) for pid in sorted(processes)]
    for pid in processes:
        _end(pid)
    if left:
        pytest.fail("the test left behind:\n  " + "\n  ".join(left), pytrace=False)
