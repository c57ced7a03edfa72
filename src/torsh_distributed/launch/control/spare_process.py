"""The warm spare: a parked process that has imported torch, from which new workers are forked.

Importing torch takes a second or more of a core; a fork takes milliseconds. One spare serves every worker that is
started later on this node: in place of a lost one, or after a restart of all. It is started once the workers run, so it
does not compete with their start, unless they are to be forked from it too (`--start-method forkserver`). It never
imports the user's modules: they may act when they are imported.

The forked worker becomes a child of the launcher (a subreaper), like any other worker, so its exit status is known.

Processes and threads: everything here runs on the launcher's loop, in one thread. The spare starts no thread, because a
fork takes along only the one that forks. It answers one order at a time, and between its first word (it is warm) and
its end it says nothing unasked, so what is read after an order is the answer to it.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torsh_distributed.launch.local.failure_report import LauncherOutput
from torsh_distributed.launch.local.guardian import MARK_VARIABLE, Guardian
from torsh_distributed.launch.local.loop import Loop, Timer
from torsh_distributed.launch.local.worker_variables import STARTUP_DIRECTORY
from torsh_distributed.launch.local.workers import WorkerProcess
from torsh_distributed.launch.worker import spare

_FIRST_LOOK_S = 1.0
_LOOK_S = 0.5
_ANSWER_TIMEOUT_S = 5.0
_WARM_TIMEOUT_S = 60.0
_EXIT_WAIT_S = 2.0
_MAX_REVIVALS = 3
_PR_SET_CHILD_SUBREAPER = 36


class ForkedWorker:
    """A worker that was forked from the spare; a child of this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self, timeout: float | None = None) -> int:
        """Collect it, at most `timeout` seconds from now."""
        deadline = time.monotonic() + (timeout or 0)
        while True:
            try:
                found, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                return 0
            if found:
                return os.waitstatus_to_exitcode(status)
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout or 0)
            _wait_for_exit(self.pid, remaining_s)


def _wait_for_exit(pid: int, timeout_s: float) -> None:
    pidfd = os.pidfd_open(pid)
    try:
        poller = select.poll()  # select() cannot: many workers make high descriptors
        poller.register(pidfd, select.POLLIN)
        poller.poll(timeout_s * 1e3)
    finally:
        os.close(pidfd)


class SpareProcess:
    """The launcher's handle on the spare. Without one that is warm, workers are started in the usual way."""

    def __init__(self, loop: Loop, guardian: Guardian, output: LauncherOutput, *, variables: Mapping[str, str]) -> None:
        """`variables` are those of the workers that libraries read when they are loaded."""
        self._variables = variables
        self._num_revived = 0
        self._loop = loop
        self._guardian = guardian
        self._output = output
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_warm = False
        self._timer: Timer | None = None
        self._begin: Callable[[], None] | None = None
        self.num_started = 0
        """Workers that were forked so far."""

    @property
    def pid(self) -> int | None:
        """The spare's process id, if it runs."""
        return None if self._process is None else self._process.pid

    @property
    def is_warm(self) -> bool:
        """Whether it has imported torch and waits."""
        return self._is_warm

    def warm_up_then(self, begin: Callable[[], None]) -> None:
        """Start the spare now, and call `begin` once it is warm; also if it is not to be had, or takes too long."""
        self._begin = begin
        self._start()
        if self._process is None:
            self._begin_now()
        else:
            self._timer = self._loop.call_later(_WARM_TIMEOUT_S, self._begin_now)

    def _begin_now(self) -> None:
        begin, self._begin = self._begin, None
        if begin is not None:
            if self._timer is not None:
                self._timer.cancel()
            begin()

    def keep_warm_beside(self, pids: Sequence[int]) -> None:
        """Start the spare as soon as these workers have all imported torch: before, it would slow them down."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(_FIRST_LOOK_S, lambda: self._start_if_wanted(pids))

    def _start_if_wanted(self, pids: Sequence[int]) -> None:
        if self._process is not None:
            return
        if pids and all(_has_torch(pid) for pid in pids):
            self._start()
        elif any(map(_is_running, pids)):
            self._timer = self._loop.call_later(_LOOK_S, lambda: self._start_if_wanted(pids))

    def _start(self) -> None:
        if self._process is not None:
            return
        # Not marked as the job's: what belongs to an attempt ends with it, and the spare outlives attempts.
        env = {name: value for name, value in os.environ.items() if name != MARK_VARIABLE}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(STARTUP_DIRECTORY), env.get("PYTHONPATH"))))
        env.update(self._variables)
        try:
            self._process, control = spare.start_spare(env)
        except OSError as error:
            self._output.warn(f"no warm spare: {error.strerror or error}")
            return
        _adopt_orphans(True)
        self._control = control
        control.setblocking(False)
        self._guardian.watch_session(self._process.pid)
        self._loop.watch(control.fileno(), self._hear)

    def _hear(self) -> None:
        """The first word is that it is warm; end of file means that it ended."""
        assert self._control is not None, "watched while it is open"
        try:
            data = self._control.recv(spare.MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._is_warm = True
        else:
            self._drop()
            self._revive()
        self._begin_now()

    def _revive(self) -> None:
        """Start another one soon, unless that keeps happening; those beside it have imported torch by now, or ended."""
        if self._num_revived < _MAX_REVIVALS:
            self._num_revived += 1
            self._timer = self._loop.call_later(_FIRST_LOOK_S, self._start)

    def start(
        self, command: Sequence[str], env: Mapping[str, str], *, stdout: int, stderr: int, line: int
    ) -> WorkerProcess | None:
        """Fork a worker: None if the spare is not warm, or ends over it; the worker is then started the usual way."""
        if not self._is_warm or self._control is None:
            return None
        # The loop stands still for the milliseconds of a fork: the caller needs the pid, and `_hear` must not take it.
        try:
            self._control.settimeout(_ANSWER_TIMEOUT_S)
            fds = stdout, stderr, line
            pid = spare.order_worker(self._control, command[3:], env, fds, cwd=str(Path.cwd()), is_adopted=True)
            self._control.setblocking(False)
        except (OSError, ValueError, KeyError):
            self._drop()
            self._revive()
            return None
        self.num_started += 1
        return ForkedWorker(pid)

    def _drop(self) -> None:
        """The spare ended or does not answer: end it, and have another one for the next time."""
        process, control = self._process, self._control
        self._is_warm, self._process, self._control = False, None, None
        # Unwatched before it is closed: the next descriptor may get its number.
        if control is not None:
            self._loop.unwatch(control.fileno())
            control.close()
        if process is not None:
            process.kill()
            process.wait(_EXIT_WAIT_S)

    def close(self) -> None:
        """End the spare; what waits for it does not begin."""
        self._begin = None
        if self._timer is not None:
            self._timer.cancel()
        had_process = self._process is not None
        self._drop()
        if had_process:
            # While they still come to this process; workers are collected by their attempt, before this.
            _reap_orphans()
            _adopt_orphans(False)


def _has_torch(pid: int) -> bool:
    try:
        return b"libtorch" in Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:
        return False


def _is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _adopt_orphans(is_wanted: bool) -> None:
    """Become, or stop being, the parent of descendants whose own parent ended."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(is_wanted), 0, 0, 0)


def _reap_orphans() -> None:
    """Collect zombies that came to this process: helpers of workers that ended before them."""
    try:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    except OSError:
        return
    for child in map(int, children):
        try:
            state = Path(f"/proc/{child}/stat").read_bytes().rpartition(b")")[2].split()[0]
            if state == b"Z":
                os.waitpid(child, os.WNOHANG)
        except (OSError, IndexError):
            continue
