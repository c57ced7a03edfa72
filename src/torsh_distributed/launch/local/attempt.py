"""One attempt on one node: its workers, their output, and the report on the first that fails."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torsh_distributed.launch.entry import command_line
from torsh_distributed.launch.local.exit_causes import ExitStatus, OomCounter, OomEvidence, oom_evidence
from torsh_distributed.launch.local.failure_report import LauncherOutput, join_numbers
from torsh_distributed.launch.local.guardian import Guardian
from torsh_distributed.launch.local.job_failure import JobFailure
from torsh_distributed.launch.local.loop import Loop, Timer
from torsh_distributed.launch.local.output import LinePrefix, OutputPump, open_log, wants_colour
from torsh_distributed.launch.local.terminal import StreamName, Terminal
from torsh_distributed.launch.local.worker_variables import AttemptEndpoint, worker_environment
from torsh_distributed.launch.local.workers import Worker, WorkerExit, Workers
from torsh_distributed.launch.spec import JobSpec, WorkerPlace
from torsh_distributed.launch.worker.progress import read_progress

_EARLY_EXIT_NOTICE_S = 30.0
_STDERR_WAIT_S = 0.5
_MAX_LINE_CHARS = 500


@dataclass(frozen=True, kw_only=True)
class AttemptContext:
    """What all attempts of a job on this node share."""

    spec: JobSpec
    loop: Loop
    terminal: Terminal
    output: LauncherOutput
    guardian: Guardian
    directory: Path
    """Private and temporary, for progress files."""
    mark: str
    """In the environment of every process of the job."""
    secret_file: Path
    """Where the workers find the job's secret."""
    oom_counter: OomCounter | None


class LocalAttempt:
    """The workers of one attempt. Calls `on_failed` or `on_finished` once, unless it is stopped first."""

    def __init__(
        self,
        context: AttemptContext,
        endpoint: AttemptEndpoint,
        *,
        log_dir: Path | None,
        on_failed: Callable[[JobFailure], None],
        on_finished: Callable[[], None],
    ) -> None:
        self.number = endpoint.attempt
        self._context = context
        self._endpoint = endpoint
        self._log_dir = log_dir
        self._on_failed = on_failed
        self._on_finished = on_finished
        self._oom_before = context.oom_counter.read() if context.oom_counter is not None else None
        self._pump = OutputPump(context.terminal, warn=context.output.warn)
        self._workers = Workers(context.loop, context.guardian, mark=context.mark, on_exit=self._on_exit)
        self._timers: list[Timer] = []
        self._is_decided = False
        self._after_stop: Callable[[], None] | None = None

    @property
    def running_ranks(self) -> list[int]:
        """Ranks whose worker has not ended."""
        return [worker.place.rank for worker in self._workers.running]

    def start(self) -> None:
        """Start every worker of this node. Raises if one cannot start; `close` ends the others."""
        for place in self._context.spec.places():
            self._start_worker(place)

    def _start_worker(self, place: WorkerPlace) -> None:
        context, spec = self._context, self._context.spec
        progress_file = context.directory / f"attempt-{self.number}-rank-{place.rank}"
        env = worker_environment(
            spec,
            place,
            self._endpoint,
            base=os.environ,
            mark=context.mark,
            secret_file=context.secret_file,
            progress_file=progress_file,
        )
        pipes = self._workers.start(place, command_line(spec.entry), env, progress_file=progress_file)
        is_shown = spec.shown_ranks is None or place.local_rank in spec.shown_ranks
        width = len(str(spec.world_size - 1))
        streams: tuple[StreamName, StreamName] = ("stdout", "stderr")
        for name, pipe in zip(streams, pipes, strict=True):
            is_coloured = wants_colour(is_tty=context.terminal.is_tty(name), environ=os.environ)
            prefix = LinePrefix(place.rank, width, is_coloured) if is_shown else None
            log = open_log(self._log_dir, place.rank, name) if self._log_dir is not None else None
            self._pump.add(place.rank, name, pipe, prefix=prefix, log=log)

    def _on_exit(self, worker: Worker, worker_exit: WorkerExit) -> None:
        if self._after_stop is not None:
            if not self._workers.running:
                self._after_stop()
            return
        if self._is_decided:
            return
        if not worker_exit.status.is_success:
            self._is_decided = True
            self._on_failed(self._failure(worker, worker_exit))
        elif not self._workers.running:
            self._is_decided = True
            self._on_finished()
        elif not self._timers:
            self._timers.append(self._context.loop.call_later(_EARLY_EXIT_NOTICE_S, self._notice_early_exit))

    def _notice_early_exit(self) -> None:
        ended = [worker.place.rank for worker in self._workers.all if worker.exit is not None]
        if self._after_stop is None and self._workers.running:
            self._context.output.warn(
                f"rank {join_numbers(ended)} ended with exit code 0 over {_EARLY_EXIT_NOTICE_S:g} s ago; "
                f"rank {join_numbers(self.running_ranks)} still running"
            )

    def _failure(self, worker: Worker, worker_exit: WorkerExit) -> JobFailure:
        """Everything known about a worker that failed."""
        status, rank = worker_exit.status, worker.place.rank
        self._pump.wait_ended({rank}, timeout_s=_STDERR_WAIT_S)
        progress = read_progress(worker.progress_file)
        evidence = oom_evidence(self._context.oom_counter, self._oom_before)
        return JobFailure(
            node_rank=worker.place.node_rank,
            node_name=socket.gethostname(),
            rank=rank,
            pid=worker.pid,
            exit_code=status.shell_code,
            cause=status.describe(),
            evidence=_describe_evidence(evidence, status),
            ran_s=worker_exit.at_s - worker.started_s,
            step=progress.step,
            checkpoint_step=progress.checkpoint_step,
            last_lines=tuple(line[:_MAX_LINE_CHARS] for line in self._pump.tail(rank)),
            log=str(self._log_dir / f"rank-{rank}.stderr.log") if self._log_dir is not None else None,
            finished_before=tuple(
                (other.place.rank, worker_exit.at_s - other.exit.at_s)
                for other in self._workers.all
                if other.exit is not None and other.exit.status.is_success
            ),
        )

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to every running worker."""
        self._workers.send_signal(number)

    def stop(self, number: signal.Signals, *, grace_s: float, then: Callable[[], None]) -> None:
        """Send a signal to the workers, kill the rest after `grace_s`, call `then` once none runs.

        A second call only replaces `then`.
        """
        is_first = self._after_stop is None
        self._after_stop = then
        if not self._workers.running:
            self._context.loop.call_later(0, then)
        elif is_first:
            self._workers.send_signal(number)
            self._timers.append(self._context.loop.call_later(grace_s, self.kill))

    def kill(self) -> None:
        """Kill every worker."""
        self._workers.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """End all processes, pipes and timers of the attempt; warns of processes that cannot be ended."""
        for timer in self._timers:
            timer.cancel()
        remaining = self._workers.clear()
        self._pump.close()
        if remaining:
            named = ", ".join(f"{command} (pid {pid})" for pid, command in sorted(remaining.items()))
            self._context.output.warn(f"could not end {named}")


def _describe_evidence(evidence: OomEvidence | None, status: ExitStatus) -> str | None:
    """The evidence in words, claiming no more than it proves."""
    if evidence is None:
        return None
    if status.code == -signal.SIGKILL:
        return f"out of memory: {evidence.describe()}"
    return f"a process beside it ran out of memory: {evidence.describe()}"
