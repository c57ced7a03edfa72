"""One attempt on one node: its workers, their output, and the report on the first that fails."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torsh_distributed.launch.entry import command_line
from torsh_distributed.launch.failure_report import Voice, join_numbers
from torsh_distributed.launch.local.exit_causes import ExitStatus, OomCounter, OomEvidence, oom_evidence
from torsh_distributed.launch.local.guardian import Guardian
from torsh_distributed.launch.local.loop import Loop, Timer
from torsh_distributed.launch.local.output import OutputPump, Prefix, open_log, wants_colour
from torsh_distributed.launch.local.terminal import StreamName, Terminal
from torsh_distributed.launch.local.worker_variables import AttemptEndpoint, worker_environment
from torsh_distributed.launch.local.workers import Ending, Worker, Workers
from torsh_distributed.launch.nodes.records import Failure
from torsh_distributed.launch.spec import JobSpec, WorkerPlace
from torsh_distributed.launch.worker.progress import read_progress

_EARLY_EXIT_NOTICE_S = 30.0
_STDERR_WAIT_S = 0.5
_MAX_LINE_CHARS = 500


@dataclass(frozen=True, kw_only=True)
class Ground:
    """What the attempts of a job on this node stand on; it outlives each of them."""

    spec: JobSpec
    loop: Loop
    terminal: Terminal
    voice: Voice
    guardian: Guardian
    directory: Path
    """Private and temporary: for progress files."""
    mark: str
    """In the environment of every process of the job."""
    token: str
    oom_counter: OomCounter | None


class LocalAttempt:
    """The workers of one attempt. One of `on_failed` and `on_finished` is called, once, unless it is stopped before."""

    def __init__(
        self,
        ground: Ground,
        endpoint: AttemptEndpoint,
        *,
        log_dir: Path | None,
        on_failed: Callable[[Failure], None],
        on_finished: Callable[[], None],
    ) -> None:
        self.number = endpoint.attempt
        self._ground = ground
        self._endpoint = endpoint
        self._log_dir = log_dir
        self._on_failed = on_failed
        self._on_finished = on_finished
        self._oom_before = ground.oom_counter.read() if ground.oom_counter is not None else None
        self._pump = OutputPump(ground.terminal, warn=ground.voice.warn)
        self._workers = Workers(ground.loop, ground.guardian, mark=ground.mark, on_exit=self._on_exit)
        self._timers: list[Timer] = []
        self._is_decided = False
        self._after_stop: Callable[[], None] | None = None

    @property
    def running_ranks(self) -> list[int]:
        """Ranks whose worker has not ended."""
        return [worker.place.rank for worker in self._workers.running]

    def start(self) -> None:
        """Start every worker of this node; if one cannot start, raises, and `close` ends the others."""
        for place in self._ground.spec.places():
            self._start_worker(place)

    def _start_worker(self, place: WorkerPlace) -> None:
        ground, spec = self._ground, self._ground.spec
        progress_file = ground.directory / f"attempt-{self.number}-rank-{place.rank}"
        env = worker_environment(
            spec,
            place,
            self._endpoint,
            base=os.environ,
            mark=ground.mark,
            token=ground.token,
            progress_file=progress_file,
        )
        pipes = self._workers.start(place, command_line(spec.entry), env, progress_file=progress_file)
        is_shown = spec.shown_ranks is None or place.local_rank in spec.shown_ranks
        width = len(str(spec.world_size - 1))
        streams: tuple[StreamName, StreamName] = ("stdout", "stderr")
        for name, pipe in zip(streams, pipes, strict=True):
            is_coloured = wants_colour(is_tty=ground.terminal.is_tty(name), environ=os.environ)
            prefix = Prefix(place.rank, width, is_coloured) if is_shown else None
            log = open_log(self._log_dir, place.rank, name) if self._log_dir is not None else None
            self._pump.add(place.rank, name, pipe, prefix=prefix, log=log)

    def _on_exit(self, worker: Worker, ending: Ending) -> None:
        if self._after_stop is not None:
            if not self._workers.running:
                self._after_stop()
            return
        if self._is_decided:
            return
        if not ending.status.is_success:
            self._is_decided = True
            self._on_failed(self._failure(worker, ending))
        elif not self._workers.running:
            self._is_decided = True
            self._on_finished()
        elif not self._timers:
            self._timers.append(self._ground.loop.call_later(_EARLY_EXIT_NOTICE_S, self._notice_early_exit))

    def _notice_early_exit(self) -> None:
        ended = [worker.place.rank for worker in self._workers.all if worker.ending is not None]
        if self._after_stop is None and self._workers.running:
            self._ground.voice.warn(
                f"rank {join_numbers(ended)} ended with exit code 0 over {_EARLY_EXIT_NOTICE_S:g} s ago; "
                f"rank {join_numbers(self.running_ranks)} still running"
            )

    def _failure(self, worker: Worker, ending: Ending) -> Failure:
        """Everything known about a worker that failed."""
        status, rank = ending.status, worker.place.rank
        self._pump.wait_ended({rank}, timeout_s=_STDERR_WAIT_S)
        progress = read_progress(worker.progress_file)
        evidence = oom_evidence(self._ground.oom_counter, self._oom_before)
        return Failure(
            node_rank=worker.place.node_rank,
            node_name=socket.gethostname(),
            rank=rank,
            pid=worker.pid,
            exit_code=status.shell_code,
            cause=status.describe(),
            evidence=_weigh(evidence, status),
            ran_s=ending.at_s - worker.started_s,
            step=progress.step,
            checkpoint_step=progress.checkpoint_step,
            last_lines=tuple(line[:_MAX_LINE_CHARS] for line in self._pump.tail(rank)),
            log=str(self._log_dir / f"rank-{rank}.stderr.log") if self._log_dir is not None else None,
            finished_before=tuple(
                (other.place.rank, ending.at_s - other.ending.at_s)
                for other in self._workers.all
                if other.ending is not None and other.ending.status.is_success
            ),
        )

    def send_signal(self, number: signal.Signals) -> None:
        """Signal every worker that runs."""
        self._workers.send_signal(number)

    def stop(self, number: signal.Signals, *, grace_s: float, then: Callable[[], None]) -> None:
        """Signal the workers, kill after `grace_s` what is left, call `then` once none runs.

        A second call replaces `then` and leaves the rest as it is going.
        """
        is_first = self._after_stop is None
        self._after_stop = then
        if not self._workers.running:
            self._ground.loop.call_later(0, then)
        elif is_first:
            self._workers.send_signal(number)
            self._timers.append(self._ground.loop.call_later(grace_s, self.kill))

    def kill(self) -> None:
        """End every worker at once."""
        self._workers.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Leave nothing behind: no process, pipe or timer. Says which process could not be ended, if any."""
        for timer in self._timers:
            timer.cancel()
        remaining = self._workers.clear()
        self._pump.close()
        if remaining:
            named = ", ".join(f"{command} (pid {pid})" for pid, command in sorted(remaining.items()))
            self._ground.voice.warn(f"could not end {named}")


def _weigh(evidence: OomEvidence | None, status: ExitStatus) -> str | None:
    """The evidence in words, claiming no more than it proves."""
    if evidence is None:
        return None
    if status.code == -signal.SIGKILL:
        return f"out of memory: {evidence.describe()}"
    return f"a process beside it ran out of memory: {evidence.describe()}"
