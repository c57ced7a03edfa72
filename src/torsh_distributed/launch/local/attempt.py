"""One attempt on one node: its workers, their output, and what is known of each that ends.

All of it runs on the launcher's loop, in one thread: what a worker says on its line, the end of its process and timers
are callbacks, each run to its end. They arrive in any order. An exception usually comes before the exit that it causes,
which may take long or never come; lines of stderr may come after it. So each end is reported once, by whichever comes
first of exit, exception and the launcher's own verdict, and what comes later finds the rank in `_failed`, `_forgiven`
or the attempt stopped.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torsh_distributed.comm.shared_memory.memory_file import KEPT_MEMORY_VARIABLE
from torsh_distributed.launch.entry import command_line
from torsh_distributed.launch.local.end_report import EndReport
from torsh_distributed.launch.local.exit_causes import (
    SAVED_EXIT_CODE,
    ExitStatus,
    FatalStack,
    OomCounter,
    OomEvidence,
    ask_for_stack,
    asked_stack,
    fatal_stack,
    is_transport_abort,
    oom_evidence,
    peak_memory,
)
from torsh_distributed.launch.local.failure_report import LauncherOutput
from torsh_distributed.launch.local.guardian import Guardian
from torsh_distributed.launch.local.loop import Loop, Timer
from torsh_distributed.launch.local.output import LinePrefix, OutputPump, open_log, wants_colour
from torsh_distributed.launch.local.terminal import StreamName, Terminal
from torsh_distributed.launch.local.worker_line import WorkerLine, is_stopped, why_silent
from torsh_distributed.launch.local.worker_variables import AttemptEndpoint, worker_environment
from torsh_distributed.launch.local.workers import Spare, Worker, WorkerExit, Workers
from torsh_distributed.launch.spec import JobSpec, WorkerPlace
from torsh_distributed.launch.worker.native_state import (
    CpuLook,
    catches_signal,
    look_at_cpu,
    read_native_state,
)
from torsh_distributed.launch.worker.rank_status import RaisedError, RankStatus, raised_from, status_from
from torsh_distributed.launch.worker.recording.progress import read_progress

_STDERR_WAIT_S = 0.5
_SHORT_STDERR_WAIT_S = 0.02
_EXIT_WAIT_S = 0.15
_ANSWER_WAIT_S = 0.5
_STACK_WAIT_S = 0.1
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
    kept_memory: Path | None = None
    """Directory in shared memory that the workers of the next attempt find again, if there may be one."""
    spare: Spare | None = None
    """What new workers are started from, if there is one."""
    fault_of: Callable[[int], str | None] = lambda _: None
    """What the GPU of a worker, by its local rank, has reported."""


@dataclass(frozen=True, kw_only=True)
class AttemptReports:
    """Whom an attempt tells what it sees."""

    failed: Callable[[EndReport], None]
    """A worker failed: its exception arrived, or it ended; once for each."""
    ended: Callable[[EndReport], None]
    """A worker ended with exit code 0."""
    measured: Callable[[int, dict[str, Any]], None]
    """A worker, by its rank, sends a summary of its metrics, or a wish to be observed."""
    said: Callable[[RankStatus, bool], None]
    """A worker says what it does; the flag tells whether it was asked."""
    finished: Callable[[], None]
    """All workers ended with exit code 0."""
    heard: Callable[[int, int, dict[str, Any]], None]
    """A worker, by its rank and pid, sent a message for the control plane."""


class LocalAttempt:
    """The workers of one attempt. After `stop` only its end is reported."""

    def __init__(
        self, context: AttemptContext, endpoint: AttemptEndpoint, *, log_dir: Path | None, reports: AttemptReports
    ) -> None:
        self.number = endpoint.attempt
        self.is_interrupted = False
        """Set when the user ends the job: an exception is then worth a line, unless it is the interrupt itself."""
        self._context = context
        self._endpoint = endpoint
        self._log_dir = log_dir
        self._reports = reports
        self._oom_before = context.oom_counter.read() if context.oom_counter is not None else None
        self._pump = OutputPump(context.terminal, warn=context.output.warn)
        self._workers = Workers(
            context.loop, context.guardian, mark=context.mark, spare=context.spare, on_exit=self._on_exit
        )
        self._rank_on: dict[int, int] = {}
        """The newest worker of each local rank."""
        self._given_up: dict[int, str] = {}
        """Ranks that the launcher killed because they no longer worked, with the reason."""
        self._raised: dict[int, RaisedError] = {}
        """By rank, the last exception that it told of: handled or not, fatal or not."""
        self._failed: set[int] = set()
        """Ranks whose failure was reported."""
        self._forgiven: set[int] = set()
        """Ranks whose end does not count any more: the job goes on without them."""
        self._unanswered: set[int] = set()
        """Ranks that were asked what they do and have not said it."""
        self._silence_timer: Timer | None = None
        self._cpu_looks: dict[int, CpuLook | None] = {}
        self._timers: list[Timer] = []
        self._after_stop: Callable[[], None] | None = None
        """Set by `stop`; from then on how a worker ends is of no interest, only that none runs."""

    @property
    def running_ranks(self) -> list[int]:
        """Ranks whose worker has not ended."""
        return [worker.place.rank for worker in self._workers.running]

    @property
    def running_pids(self) -> list[int]:
        """The processes of workers that have not ended."""
        return [worker.pid for worker in self._workers.running]

    @property
    def local_ranks(self) -> set[int]:
        """Local ranks of workers that work."""
        gone = self._failed | self._forgiven
        return {worker.place.local_rank for worker in self._workers.running if worker.place.rank not in gone}

    def rank_on(self, local_rank: int) -> int:
        """The rank of the newest worker with that local rank; -1 if there was none."""
        return self._rank_on.get(local_rank, -1)

    @property
    def has_saved(self) -> bool:
        """Whether every worker ended with the code that says: told by a signal to end, and has saved its state."""
        ended = [worker.exit.status.code for worker in self._workers.all if worker.exit is not None]
        return bool(ended) and set(ended) == {SAVED_EXIT_CODE}

    def start(self, variables: Mapping[str, str]) -> None:
        """Start every worker of this node. Raises if one cannot start; `close` ends the others."""
        for place in self._context.spec.places():
            self.start_worker(place, variables)

    def start_worker(self, place: WorkerPlace, variables: Mapping[str, str], *, joins: bool = False) -> None:
        """Start one worker; `variables` win over all others. One that `joins` will ask to enter the running world."""
        self._rank_on[place.local_rank] = place.rank
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
            joins=joins,
        )
        if context.kept_memory is not None:
            env[KEPT_MEMORY_VARIABLE] = str(context.kept_memory)
        env.update(variables)
        line = WorkerLine(context.loop, partial(self._hear, place.rank))
        pipes = self._workers.start(place, command_line(spec.entry), env, line, progress_file=progress_file)
        is_shown = spec.shown_ranks is None or place.local_rank in spec.shown_ranks
        width = len(str(spec.world_size - 1))
        streams: tuple[StreamName, StreamName] = ("stdout", "stderr")
        for name, pipe in zip(streams, pipes, strict=True):
            is_coloured = wants_colour(is_tty=context.terminal.is_tty(name), environ=os.environ)
            prefix = LinePrefix(place.rank, width, is_coloured, spec.is_raw) if is_shown else None
            log = open_log(self._log_dir, place.rank, name) if self._log_dir is not None else None
            self._pump.add(place.rank, name, pipe, prefix=prefix, log=log)

    # What workers say

    def _hear(self, rank: int, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "raised":
            self._hear_raised(rank, message)
        elif kind in ("metrics", "observe"):
            self._reports.measured(rank, message)
        elif kind in ("status", "waiting", "bye"):
            status = status_from(rank, message)
            if status is not None:
                status = dataclasses.replace(status, has_finished=kind == "bye")
                self._tell_status(status, is_asked=kind == "status")
        else:
            worker = self._workers.by_rank(rank)
            if worker is not None and worker.exit is None:
                self._reports.heard(rank, worker.pid, message)

    def tell(self, message: dict[str, Any]) -> None:
        """Send a message to every running worker."""
        data = json.dumps(message).encode()
        for worker in self._workers.running:
            worker.line.tell_encoded(data)

    def _hear_raised(self, rank: int, message: dict[str, Any]) -> None:
        raised = raised_from(message)
        worker = self._workers.by_rank(rank)
        if raised is None or worker is None:
            return
        self._raised[rank] = raised
        if message.get("is_printed") is False and isinstance(message.get("full"), str):
            # The worker leaves it to us to print: into its log, and on the terminal if everything is wanted.
            self._pump.note(rank, message["full"], is_shown=self._context.spec.is_verbose)
        history = status_from(rank, {"groups": {}, **message})
        if history is not None:
            self._tell_status(history, is_asked=False)
        if self._after_stop is not None:
            if self.is_interrupted and raised.kind != "KeyboardInterrupt" and not raised.is_consequence:
                self._context.output.warn(f"rank {rank}: {raised.where or 'at its end'}: {raised.summary}")
        elif raised.is_fatal:
            # Its exit, if it comes soon, says more; but one that hangs on its way out must not hold up the others.
            timer = self._context.loop.call_later(_EXIT_WAIT_S, lambda: self._fail(worker, None))
            self._timers.append(timer)

    def ask(self) -> None:
        """Ask every running worker what it does. Each is told about through `said`; of a silent one, why it is."""
        self._unanswered = set()
        for worker in self._workers.running:
            self._cpu_looks[worker.place.rank] = look_at_cpu(worker.pid)
            if not (worker.line.is_answered and worker.line.ask()):
                self._tell_silence(worker, "it has no line to the launcher")
            elif is_stopped(worker.pid):
                self._tell_silence(worker, why_silent(worker.pid))
            else:
                self._unanswered.add(worker.place.rank)
        if self._silence_timer is not None:
            # Of an earlier question: it would take who has yet to answer this one for silent.
            self._silence_timer.cancel()
        if self._unanswered:
            self._silence_timer = self._context.loop.call_later(_ANSWER_WAIT_S, self._note_silent)
            self._timers.append(self._silence_timer)

    def _note_silent(self) -> None:
        """What did not answer is told about: with its stack, if a signal makes Python's fault handler write it."""
        silent = [worker for worker in self._workers.running if worker.place.rank in self._unanswered]
        self._unanswered = set()
        asked = [worker for worker in silent if ask_for_stack(worker.pid, worker.progress_file)]
        for worker in silent:
            if worker not in asked:
                self._tell_silence(worker, why_silent(worker.pid))
        if asked:
            timer = self._context.loop.call_later(_STACK_WAIT_S, lambda: self._tell_stacks(asked))
            self._timers.append(timer)

    def _tell_stacks(self, silent: list[Worker]) -> None:
        for worker in silent:
            if worker in self._workers.running:
                self._tell_silence(worker, why_silent(worker.pid), stack=asked_stack(worker.progress_file).lines)

    def _tell_silence(self, worker: Worker, reason: str, *, stack: tuple[str, ...] = ()) -> None:
        self._tell_status(RankStatus(rank=worker.place.rank, silence=reason, stack=stack), is_asked=True)

    def tell_silence(self, rank: int) -> None:
        """A worker has stopped beating: say why, as far as the kernel knows."""
        worker = self._workers.by_rank(rank)
        if worker is not None and worker.exit is None:
            self._tell_status(RankStatus(rank=rank, silence=why_silent(worker.pid)), is_asked=False)

    def _tell_status(self, status: RankStatus, *, is_asked: bool) -> None:
        worker = self._workers.by_rank(status.rank)
        if worker is None or self._after_stop is not None:
            return
        if is_asked:
            self._unanswered.discard(status.rank)
        progress = read_progress(worker.progress_file)
        native = read_native_state(worker.pid, since=self._cpu_looks.get(status.rank)) if is_asked else None
        status = dataclasses.replace(
            status,
            native=native.text if native is not None else None,
            node_rank=worker.place.node_rank,
            node_name=socket.gethostname(),
            pid=worker.pid,
            step=progress.step,
            checkpoint_step=progress.checkpoint_step,
            raised=self._raised.get(status.rank),
        )
        self._reports.said(status, is_asked)

    # How workers end

    def give_up(self, rank: int, reason: str) -> None:
        """End a worker that does not work any more: killed, it can write nowhere, and it counts as failed now."""
        worker = self._workers.by_rank(rank)
        if worker is None or worker.exit is not None:
            return
        # Killed before it is reported: whoever hears of it may start another one in its place at once.
        self._given_up[rank] = reason
        worker.send_signal(signal.SIGKILL)
        self._fail(worker, None)

    def forgive(self, ranks: Sequence[int]) -> None:
        """The job goes on without these workers, whatever ended them."""
        for rank in ranks:
            worker = self._workers.by_rank(rank)
            if worker is not None:
                # Before the signal: its exit finds it here, and is not reported.
                self._failed.discard(rank)
                self._forgiven.add(rank)
                worker.send_signal(signal.SIGKILL)
        self._note_finished()

    def _note_finished(self) -> None:
        if not self._workers.running and not self._failed:
            self._reports.finished()

    def _on_exit(self, worker: Worker, worker_exit: WorkerExit) -> None:
        if self._after_stop is not None:
            if not self._workers.running:
                self._after_stop()
            return
        if worker.place.rank in self._forgiven:
            self._note_finished()
            return
        if not worker_exit.status.is_success:
            self._fail(worker, worker_exit)
            return
        if worker.place.rank in self._failed:
            return
        described = self._describe(worker, worker_exit)
        self._reports.ended(dataclasses.replace(described, cause="ended normally", raised=None, is_consequence=False))
        self._note_finished()

    def _fail(self, worker: Worker, worker_exit: WorkerExit | None) -> None:
        """Report a worker that failed: at its exit, or when its end takes long after the exception that ends it."""
        if worker.place.rank in self._failed | self._forgiven or self._after_stop is not None:
            return
        self._failed.add(worker.place.rank)
        self._reports.failed(self._describe(worker, worker_exit))

    def _describe(self, worker: Worker, worker_exit: WorkerExit | None) -> EndReport:
        """Everything known about a worker that ended, or will."""
        rank, raised = worker.place.rank, self._raised.get(worker.place.rank)
        status = worker_exit.status if worker_exit is not None else None
        exit_code = status.shell_code if status is not None else _exit_code(raised)
        by_signal = status is not None and status.code < 0
        # What left the script is the cause even if the process then aborts on its way out, as gloo's threads may.
        if raised is not None and raised.how != "uncaught" and (by_signal or raised.how not in ("exit", "leaving")):
            raised = None  # it was handled, or came from a thread: it did not end the process
        exit_line = None
        if raised is not None and raised.kind == "SystemExit":
            exit_line, raised = raised.where, None  # sys.exit: the exit code says it all
        if raised is None and worker_exit is not None:
            # What it wrote before it died may still be in the pipe. The loop stands still meanwhile, and in an elastic
            # job the others wait for word: there the last lines are given up sooner.
            is_elastic = self._context.spec.elastic is not None
            self._pump.wait_ended({rank}, timeout_s=_SHORT_STDERR_WAIT_S if is_elastic else _STDERR_WAIT_S)
        tail = tuple(line[:_MAX_LINE_CHARS] for line in self._pump.tail(rank))
        progress = read_progress(worker.progress_file)
        now_s = worker_exit.at_s if worker_exit is not None else time.monotonic()
        fatal = fatal_stack(worker.progress_file) if by_signal else FatalStack(where=exit_line)
        evidence = oom_evidence(self._context.oom_counter, self._oom_before)
        is_starved = evidence is not None and status is not None and status.code == -signal.SIGKILL
        if status is not None and (raised is None or raised.how == "exit"):
            cause = status.describe()
        else:
            cause = raised.summary if raised is not None else f"exit code {exit_code}"
        if rank in self._given_up:
            cause, exit_code, raised = self._given_up[rank], 128 + signal.SIGKILL, None
        proof = _describe_evidence(evidence, status) if status is not None else None
        if exit_code and proof is None:
            proof = self._context.fault_of(worker.place.local_rank)
        return EndReport(
            node_rank=worker.place.node_rank,
            node_name=socket.gethostname(),
            rank=rank,
            pid=worker.pid,
            exit_code=exit_code,
            cause=cause,
            evidence=proof,
            memory_bytes=peak_memory(worker.pidfd) if is_starved else None,
            raised=raised,
            is_consequence=raised.is_consequence if raised is not None else is_transport_abort(status, tail),
            at_s=raised.at_s if raised is not None else time.time() - (time.monotonic() - now_s),
            ran_s=now_s - worker.started_s,
            step=progress.step,
            checkpoint_step=progress.checkpoint_step,
            last_lines=tail,
            stack=fatal.lines,
            where=fatal.where,
            call=fatal.call,
            log=str(self._log_dir / f"rank-{rank}.stderr.log") if self._log_dir is not None else None,
            finished_before=tuple(
                (other.place.rank, now_s - other.exit.at_s)
                for other in self._workers.all
                if other.exit is not None and other.exit.status.is_success and other is not worker
            ),
        )

    def has_handler(self, number: signal.Signals) -> bool:
        """Whether a running worker handles this signal."""
        return any(catches_signal(worker.pid, number) for worker in self._workers.running)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to every running worker."""
        self._workers.send_signal(number)

    def stop(self, number: signal.Signals, *, grace_s: float, then: Callable[[], None]) -> None:
        """Send a signal to the workers, kill the rest after `grace_s`, call `then` once none runs.

        A worker that is on its way out after an exception gets no signal. A second call only replaces `then`.
        """
        is_first = self._after_stop is None
        self._after_stop = then  # before the signals: the exits that they cause are not failures
        if not self._workers.running:
            self._context.loop.call_later(0, then)
        elif is_first:
            if number == signal.SIGINT:
                self._pump.hide_interrupts()
            for worker in self._workers.running:
                if self.is_interrupted or worker.place.rank not in self._failed:
                    worker.send_signal(number)
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


def _exit_code(raised: RaisedError | None) -> int:
    """The exit code that Python will have."""
    if raised is None:
        return 1
    return 128 + signal.SIGINT if raised.kind == "KeyboardInterrupt" else raised.exit_code


def _describe_evidence(evidence: OomEvidence | None, status: ExitStatus) -> str | None:
    """The evidence in words, claiming no more than it proves."""
    if evidence is None:
        return None
    if status.code == -signal.SIGKILL:
        return f"out of memory: {evidence.describe()}"
    return f"a process beside it ran out of memory: {evidence.describe()}"
