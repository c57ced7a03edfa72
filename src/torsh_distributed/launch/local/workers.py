"""The worker processes of one attempt on this node: started, watched, signalled and ended.

Each worker leads its own session, so its children (data loaders) can be found and ended with it. A worker that
ended stays a zombie until the attempt is over, so its process id is not reused by a process we would then signal.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torsh_distributed.errors import IoError
from torsh_distributed.launch.local.exit_causes import ExitStatus, peek_status
from torsh_distributed.launch.local.guardian import Guardian, kill_members, kill_session
from torsh_distributed.launch.local.loop import Loop
from torsh_distributed.launch.local.worker_line import WorkerLine
from torsh_distributed.launch.spec import WorkerPlace
from torsh_distributed.launch.worker.launcher_line import FD_VARIABLE

_REAP_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """How a worker ended, and when on the monotonic clock."""

    status: ExitStatus
    at_s: float


class WorkerProcess(Protocol):
    """A child of this process."""

    pid: int

    def wait(self, timeout: float | None = None) -> int:
        """Collect it; subprocess.TimeoutExpired if it still runs then."""


class Spare(Protocol):
    """Starts workers from a process that has imported torch already."""

    def start(
        self, command: Sequence[str], env: Mapping[str, str], *, stdout: int, stderr: int, line: int
    ) -> WorkerProcess | None:
        """A worker that leads its own session; None if there is nothing to start it from now."""


class Worker:
    """One rank's process."""

    def __init__(self, place: WorkerPlace, process: WorkerProcess, line: WorkerLine, *, progress_file: Path) -> None:
        self.place = place
        self.process = process
        self.line = line
        self.progress_file = progress_file
        self.pidfd = os.pidfd_open(process.pid)
        self.started_s = time.monotonic()
        self.exit: WorkerExit | None = None

    @property
    def pid(self) -> int:
        """The process id, which is also its session and group."""
        return self.process.pid

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the worker; SIGINT to its whole group, as a terminal does, SIGKILL to its whole session.

        Other signals are for the worker alone, which may want to save while its helpers still run.
        """
        try:
            if number == signal.SIGINT:
                os.killpg(self.pid, number)
            else:
                signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            # It ended a moment ago; the loop handles its exit.
            if number != signal.SIGKILL:
                return
        if number == signal.SIGKILL:
            kill_session(self.pid)


class Workers:
    """All workers of an attempt on this node. `on_exit` is called once for each that ends."""

    def __init__(
        self,
        loop: Loop,
        guardian: Guardian,
        *,
        mark: str,
        spare: Spare | None = None,
        on_exit: Callable[[Worker, WorkerExit], None],
    ) -> None:
        self._spare = spare
        self._loop = loop
        self._guardian = guardian
        self._mark = mark
        self._on_exit = on_exit
        self.all: list[Worker] = []
        self._by_rank: dict[int, Worker] = {}

    def start(
        self,
        place: WorkerPlace,
        command: Sequence[str],
        env: Mapping[str, str],
        line: WorkerLine,
        *,
        progress_file: Path,
    ) -> tuple[int, int]:
        """Start one worker; returns the read ends of pipes on its stdout and stderr, which the caller owns.

        The worker takes over `line`: it is closed with the worker.
        """
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        process: WorkerProcess | None = None
        try:
            if self._spare is not None:
                process = self._spare.start(command, env, stdout=out_write, stderr=err_write, line=line.worker_fd)
            if process is None:
                process = subprocess.Popen(
                    command,
                    env={**env, FD_VARIABLE: str(line.worker_fd)},
                    stdout=out_write,
                    stderr=err_write,
                    start_new_session=True,
                    pass_fds=(line.worker_fd,),
                )
        except OSError as error:
            line.close()
            os.close(out_read)
            os.close(err_read)
            raise IoError(
                f"the worker of rank {place.rank} cannot be started",
                hint="check the command, the limits on processes (`ulimit -u`) and the free memory",
                command=command[0],
                reason=error.strerror or str(error),
            ) from error
        finally:
            os.close(out_write)
            os.close(err_write)
        line.close_worker_end()
        self._guardian.watch_session(process.pid)
        worker = Worker(place, process, line, progress_file=progress_file)
        self.all.append(worker)
        self._by_rank[place.rank] = worker
        self._loop.watch(worker.pidfd, lambda: self._note_exit(worker))
        return out_read, err_read

    def _note_exit(self, worker: Worker) -> None:
        status = peek_status(worker.pidfd)
        if status is None:
            return
        self._loop.unwatch(worker.pidfd)
        worker.line.drain()
        worker.exit = WorkerExit(status, time.monotonic())
        self._on_exit(worker, worker.exit)

    @property
    def running(self) -> list[Worker]:
        """Workers that have not ended."""
        return [worker for worker in self.all if worker.exit is None]

    def by_rank(self, rank: int) -> Worker | None:
        """The worker of a rank, if it was started."""
        return self._by_rank.get(rank)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to every running worker."""
        for worker in self.running:
            worker.send_signal(number)

    def clear(self) -> dict[int, str]:
        """Kill what is left of the attempt, children included, and collect the zombies.

        Returns the processes that could not be ended, by pid: in uninterruptible sleep, or another user's.
        """
        self.send_signal(signal.SIGKILL)
        sessions = [worker.pid for worker in self.all]
        _, remaining = kill_members(self._mark, sessions, timeout_s=_REAP_TIMEOUT_S)
        for worker in self.all:
            self._loop.unwatch(worker.pidfd)
            os.close(worker.pidfd)
            worker.line.close()
            try:
                worker.process.wait(timeout=0 if worker.pid in remaining else _REAP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                remaining.setdefault(worker.pid, f"rank {worker.place.rank}")
        self.all = []
        self._by_rank = {}
        return remaining
