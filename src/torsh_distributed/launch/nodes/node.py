"""One node's part in a job: it runs the attempts that the leader starts and reports how they end."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from torsh_distributed.comm.meeting.network_interface import interface_between_nodes
from torsh_distributed.comm.shared_memory.memory_file import make_kept_memory
from torsh_distributed.comm.trust.job_secret import write_secret_file
from torsh_distributed.comm.trust.job_tls import make_certificate
from torsh_distributed.launch.control.spare_process import SpareProcess
from torsh_distributed.launch.control.worker_health import (
    NOTICED,
    Health,
    HealthLimits,
    HealthState,
    HealthWatch,
    LeavingWatch,
)
from torsh_distributed.launch.local.attempt import AttemptContext, AttemptReports, LocalAttempt
from torsh_distributed.launch.local.end_report import EndReport
from torsh_distributed.launch.local.exit_causes import SAVED_EXIT_CODE, find_oom_counter
from torsh_distributed.launch.local.failure_report import LauncherOutput, join_numbers
from torsh_distributed.launch.local.guardian import Guardian
from torsh_distributed.launch.local.loop import Loop
from torsh_distributed.launch.local.signals import PASSED_ON
from torsh_distributed.launch.local.terminal import Terminal
from torsh_distributed.launch.local.worker_variables import AttemptEndpoint, sets_omp_threads
from torsh_distributed.launch.nodes.records import (
    AddWorker,
    Ask,
    ChangeMembers,
    ChangePlan,
    ChangeSaid,
    ChangeWanted,
    DiagnosisWanted,
    End,
    Ended,
    Failed,
    Finished,
    ForgetWorkers,
    FromLeader,
    FromNode,
    Interrupted,
    JoinAccepted,
    Measured,
    MemberSaid,
    Said,
    Start,
    Stop,
    Stopped,
    Unable,
    WorkersWanted,
)
from torsh_distributed.launch.observing.job_observer import JobObserver
from torsh_distributed.launch.observing.node_gpus import NodeGpus
from torsh_distributed.launch.spec import JobSpec, WorkerPlace
from torsh_distributed.launch.worker.rank_status import RankStatus

if TYPE_CHECKING:
    from torsh_distributed.launch.observing.energy_watch import EnergyWatch

_MAX_REVIVALS = 3
_REPORT_TIMEOUT_S = 20.0


class Node:
    """The workers of this node under the leader's command; leaving the context ends all it started."""

    def __init__(
        self, spec: JobSpec, loop: Loop, terminal: Terminal, output: LauncherOutput, *, mark: str, token: str
    ) -> None:
        if spec.spans_nodes:
            # For `_emit`: now, and not in the loop, which other nodes wait for.
            from torsh_distributed.events import MembershipEvent, emit  # noqa: F401
        self._guardian = Guardian(mark)
        self.directory = Path(tempfile.mkdtemp(prefix="torsh-run-"))
        """Private to this user and temporary: progress files, the secret, the store's socket."""
        self._guardian.remove_directory(self.directory)
        self._kept_memory = make_kept_memory() if spec.elastic is not None or spec.max_restarts > 0 else None
        if self._kept_memory is not None:
            self._guardian.remove_directory(self._kept_memory)
        if spec.wants_tls and spec.tls is None:
            spec = dataclasses.replace(spec, tls=make_certificate(self.directory))
        self.spec = spec
        """The job, with what was made for it here."""
        secret_file = self.directory / "secret"
        write_secret_file(secret_file, token)
        self._spare = _spare(spec, loop, self._guardian, output)
        self._gpus = NodeGpus(spec, loop, output, rank_of=self._rank_on, tell=partial(self._take_own, -1))
        self._context = AttemptContext(
            spec=spec,
            loop=loop,
            terminal=terminal,
            output=output,
            guardian=self._guardian,
            directory=self.directory,
            kept_memory=self._kept_memory,
            mark=mark,
            secret_file=secret_file,
            oom_counter=find_oom_counter(),
            spare=self._spare,
            fault_of=self._gpus.fault_of,
        )
        self._spec = spec
        self._loop = loop
        self._output = output
        self._observer = JobObserver(spec, loop, output, on_change=self._want_change)
        self._pause_share = 0.0
        self._energy: EnergyWatch | None = None
        if spec.green is not None:
            # Imported here: a job that measures nothing starts without.
            from torsh_distributed.launch.observing.energy_watch import EnergyWatch

            end = partial(self.interrupt, signal.SIGTERM)
            self._energy = EnergyWatch(
                spec.green,
                spec,
                loop,
                output,
                take=partial(self._take_own, -1),
                pace=self._pace_workers,
                stop=end,
                want=self._want_workers,
                guardian=self._guardian,
                directory=self.directory,
            )
        self._attempt: LocalAttempt | None = None
        self._health: HealthWatch | None = None
        self._leaving: LeavingWatch | None = None
        self._attempt_number = 0
        self._early_changes: list[ChangePlan] = []
        """Told before the workers of the attempt were started: they hear of it then."""
        self._num_revived = 0
        loop.watch(self._guardian.pidfd, self._revive_guardian)
        self._log_name = spec.run_id
        self._is_interrupted = False
        self._is_ending = False
        self.report: Callable[[FromNode], None] = _ignore
        """Sends a report to the leader; set once the leader is known."""

    def count_workers(self) -> tuple[int, int]:
        """Workers of this node that run, and how many there should be; none run any more once the job is ending."""
        is_up = self._attempt is not None and not (self._is_interrupted or self._is_ending)
        return (len(self._attempt.running_ranks) if is_up and self._attempt else 0), self._spec.workers_on(
            self._spec.node_rank
        )

    def handle(self, message: FromLeader) -> None:
        """Carry out a record of the leader."""
        match message:
            case JoinAccepted():
                self._log_name = message.log_name
            case Start():
                self._start(message)
            case Ask():
                if self._attempt is not None and self._attempt.number == message.attempt:
                    self._attempt.ask()
            case ChangeMembers():
                self._change_members(message)
            case ChangePlan():
                self._change_plan(message)
            case ForgetWorkers():
                self._forget_workers(message)
            case AddWorker():
                self._add_worker(message)
            case Stop():
                self._stop(message)
            case End():
                self._end(message)

    def _start(self, message: Start) -> None:
        if message.attempt == 0 and sets_omp_threads(self._spec, os.environ) and self._reports_itself:
            self._output.say("OMP_NUM_THREADS=1 for every worker, as torchrun does; set it to choose otherwise")
        self._close_attempt()
        self._early_changes = []
        self._attempt_number = number = message.attempt
        if message.workers_by_node:
            # As many as there are slots for: other ones than at the start of the job, after a restart.
            counts = message.workers_by_node
            self._spec = dataclasses.replace(self._spec, nnodes=len(counts), workers_by_node=counts)
            self._context = dataclasses.replace(self._context, spec=self._spec)
        if number == 0 and self._spare is not None and self._spec.forks_workers:
            self._spare.warm_up_then(partial(self._begin, message))
        else:
            self._begin(message)

    def _begin(self, message: Start) -> None:
        number = message.attempt
        if self._is_ending or self._attempt_number != number:
            return  # the job ended, or was restarted, while the spare imported torch
        starting = {place.local_rank for place in self._spec.places()}
        gpus = self._gpus.variables(starting, ())
        if gpus is None:
            self.report(Unable(attempt=number, failure=self._gpus.shortage(len(starting))))
            return
        self._attempt = LocalAttempt(
            self._context,
            AttemptEndpoint(
                attempt=message.attempt,
                master_addr=message.master_addr,
                master_port=message.master_port,
                interface=interface_between_nodes(message.master_addr, num_nodes=2 if self._spec.spans_nodes else 1),
                local_store=message.local_store if self._spec.is_leader else "",
                machine_interval_s=message.machine_interval_s,
            ),
            log_dir=self._log_dir(message.attempt),
            reports=AttemptReports(
                failed=lambda failure: self.report(Failed(attempt=number, failure=failure)),
                ended=partial(self._note_ended, number),
                measured=self._take_own,
                said=partial(self._note_said, number),
                finished=lambda: self.report(Finished(attempt=number)),
                heard=partial(self._hear, number),
            ),
        )
        self._leaving = LeavingWatch(
            self._loop,
            limit_s=self._spec.exit_timeout_s,
            ask=self._attempt.ask,
            warn=self._output.warn,
            end=self._attempt.give_up,
        )
        self._attempt.start(gpus)
        self._gpus.start()
        if self._pause_share:
            self._pace_workers(self._pause_share)
        early, self._early_changes = self._early_changes, []
        for change in early:
            self._change_plan(change)
        if self._spec.elastic is not None:
            limits = HealthLimits(
                stopped_s=self._spec.elastic.stop_timeout_s, silent_s=self._spec.elastic.hang_timeout_s
            )
            self._health = HealthWatch(self._loop, limits, partial(self._note_health, number))
        else:
            self._health = HealthWatch(self._loop, NOTICED, self._note_silence)
        if self._spare is not None and self._spec.may_restart:
            self._spare.keep_warm_beside(self._attempt.running_pids)
        elif self._spare is not None:
            self._spare.close()  # all there will be were forked
        self._emit("restarted" if message.attempt else "started")

    def _note_ended(self, attempt: int, worker: EndReport) -> None:
        if self._leaving is not None:
            self._leaving.forget(worker.rank)
        self.report(Ended(attempt=attempt, worker=worker))

    def _note_said(self, attempt: int, status: RankStatus, is_asked: bool) -> None:
        if self._leaving is not None:
            self._leaving.note(status)
        self.report(Said(attempt=attempt, status=status, is_asked=is_asked))

    def _take_own(self, rank: int, message: dict[str, Any]) -> None:
        """A worker of this node measured something: for the observer here, and for node 0's."""
        self._observer.take(rank, message)
        if self._energy is not None:
            self._energy.heed(rank, message)
        if not self._spec.is_leader:
            self.report(Measured(rank=rank, message=json.dumps(message)))

    def _pace_workers(self, pause_share: float) -> None:
        """Let the workers pause between steps; those that are started later hear of it too."""
        self._pause_share = pause_share
        if self._attempt is not None:
            self._attempt.tell({"type": "pace", "pause_share": pause_share})

    def take_measured(self, measured: Measured) -> None:
        """On node 0: a worker or a meter of another node measured something."""
        message = json.loads(measured.message)
        if isinstance(message, dict):
            self._observer.take(measured.rank, message)
            if self._energy is not None:
                self._energy.heed(measured.rank, message)

    # The control plane of an elastic job

    def _hear(self, attempt: int, member: int, pid: int, message: dict[str, Any]) -> None:
        """A worker's beat, or what it tells about its place in the world."""
        if self._health is None:
            return
        if self._spec.elastic is None and message["type"] == "beat":
            self._health.watch(member, pid)  # from its first beat on
            return
        self._health.beat(member)
        if message["type"] == "change" and (answer := ChangeSaid.read(attempt, member, message)) is not None:
            self.report(answer)
        if message["type"] != "elastic":
            return
        if message.get("what") == "ready":
            self._health.watch(member, pid)
        if (said := MemberSaid.read(attempt, member, message)) is not None:
            self.report(said)

    def _want_workers(self, workers: int, reason: str, longest_s: float) -> None:
        """The policy on energy says how many workers train."""
        self.report(WorkersWanted(workers=workers, reason=reason, longest_s=longest_s))

    def _want_change(self, change: str, reason: str) -> None:
        """A rule of alerts asks for a change of the plan."""
        self.report(ChangeWanted(change=change, reason=reason))

    def _change_plan(self, message: ChangePlan) -> None:
        if self._attempt is None and self._attempt_number == message.attempt:
            self._early_changes.append(message)
        if self._attempt is not None and self._attempt.number == message.attempt:
            told = {"type": "change", "what": message.what, "number": message.number, "at": message.at}
            self._attempt.tell({**told, "change": json.loads(message.change), "reason": message.reason})

    def _note_health(self, attempt: int, member: int, health: Health) -> None:
        self.report(
            MemberSaid(attempt=attempt, member=member, what="health", detail=f"{health.state}: {health.reason}")
        )
        if health.state is HealthState.FAILED and self._attempt is not None and self._health is not None:
            self._health.forget(member)
            self._attempt.give_up(member, health.reason)

    def _note_silence(self, rank: int, health: Health) -> None:
        """A worker of a job whose world is fixed stopped beating: the doctor looks at it, nobody is given up."""
        if health.state is HealthState.CRITICAL and self._attempt is not None:
            self._attempt.tell_silence(rank)

    def _change_members(self, message: ChangeMembers) -> None:
        attempt = self._attempt
        if attempt is None or attempt.number != message.attempt:
            return
        attempt.tell(
            {
                "type": "view",
                "epoch": message.epoch,
                "members": message.members,
                "is_urgent": message.is_urgent,
                "leaving": message.leaving,
                "is_held": message.is_held,
            }
        )

    def _forget_workers(self, message: ForgetWorkers) -> None:
        if self._attempt is None or self._attempt.number != message.attempt:
            return
        if self._health is not None:
            for member in message.members:
                self._health.forget(member)
        self._attempt.forgive(message.members)

    def _add_worker(self, message: AddWorker) -> None:
        attempt = self._attempt
        if attempt is None or attempt.number != message.attempt or message.node_rank != self._spec.node_rank:
            return
        taken = attempt.local_ranks
        local_rank = next(number for number in range(len(taken) + 1) if number not in taken)
        gpus = self._gpus.variables({local_rank}, taken)
        if gpus is None:
            lacking = self._gpus.shortage(len(taken) + 1, rank=message.member)
            self.report(Failed(attempt=message.attempt, failure=lacking))
            return
        place = WorkerPlace(rank=message.member, local_rank=local_rank, node_rank=self._spec.node_rank)
        attempt.start_worker(place, gpus, joins=True)

    def _rank_on(self, local_rank: int) -> int:
        return -1 if self._attempt is None else self._attempt.rank_on(local_rank)

    def _log_dir(self, attempt: int) -> Path | None:
        if self._spec.log_dir is None:
            return None
        return self._spec.log_dir / self._log_name / f"attempt-{attempt}"

    def _stop(self, message: Stop) -> None:
        self._show_failure(message.failure)
        if self._reports_itself:
            self._output.say(f"restart {message.attempt + 1} of {self._spec.max_restarts}: all workers are restarted")
        if self._attempt is None:
            self._stopped(message.attempt)
        else:
            self._attempt.stop(
                signal.SIGTERM,
                grace_s=self._spec.shutdown_timeout_s,
                then=lambda: self._stopped(message.attempt),
            )

    def _stopped(self, attempt: int) -> None:
        self._close_attempt()
        self.report(Stopped(attempt=attempt))

    def _end(self, message: End) -> None:
        if self._is_ending:
            return
        self._is_ending = True
        if message.failure is not None:
            self._show_failure(message.failure)
        if self._attempt is None:
            self._over(message.exit_code)
            return
        is_signal = message.signal is not None
        self._attempt.is_interrupted = is_signal
        self._attempt.stop(
            signal.Signals(message.signal) if message.signal is not None else signal.SIGTERM,
            grace_s=self._spec.signal_timeout_s if is_signal else self._spec.shutdown_timeout_s,
            then=lambda: self._over(self._code_after_signal(message) if is_signal else message.exit_code),
        )

    def _code_after_signal(self, message: End) -> int:
        """128 + signal, unless the workers saved first: whoever starts jobs then knows that this one can go on."""
        has_saved = self._attempt is not None and self._attempt.has_saved
        return SAVED_EXIT_CODE if has_saved else message.exit_code

    def _over(self, exit_code: int) -> None:
        self._close_attempt()
        if self._energy is not None:
            self._energy.close(is_done=exit_code == 0)
            self._energy = None
        self._observer.tell_end(exit_code, attempt=self._attempt_number)
        self._observer.finish(timeout_s=_REPORT_TIMEOUT_S)
        if self._spec.is_json:
            self._output.finish_json(exit_code, attempts=self._attempt_number + 1)
        elif exit_code and not self._is_interrupted and self._reports_itself:  # else the line about the signal said so
            attempts = "1 attempt" if self._attempt_number == 0 else f"{self._attempt_number + 1} attempts"
            self._output.say(f"the job ended with exit code {exit_code} after {attempts}")
        self._emit("ended", detail=f"exit code {exit_code}")
        self._loop.stop(exit_code)

    def interrupt(self, number: signal.Signals) -> None:
        """Handle a signal: some are for the workers, the others end the job; a second one kills everything at once."""
        running = self._attempt.running_ranks if self._attempt is not None else []
        if number == signal.SIGUSR1 and self._attempt is not None and not self._attempt.has_handler(number):
            # It would only end the workers; so it asks what they do.
            self.report(DiagnosisWanted())
        elif number in PASSED_ON:
            if self._attempt is not None:
                self._attempt.send_signal(number)
        elif self._is_interrupted:
            self._output.warn(f"{number.name} again: everything is killed now")
            if self._attempt is not None:
                self._attempt.kill()
            self._over(128 + number)
        else:
            self._is_interrupted = True
            if self._attempt is not None:
                self._attempt.is_interrupted = True
            if running:
                self._output.say(
                    f"{number.name} is forwarded to rank {join_numbers(running)}; what still runs in "
                    f"{self._spec.signal_timeout_s:g} s, or at the next signal, is killed"
                )
            else:
                self._output.say(f"{number.name}: the job ends")
            self.report(Interrupted(signal=number))

    @property
    def _reports_itself(self) -> bool:
        """Whether this node prints what concerns the whole job."""
        return self._spec.is_leader or self._spec.repeats_reports

    def _show_failure(self, failure: EndReport) -> None:
        is_leader_lost = failure.node_rank == 0 and failure.rank is None  # which node 0 cannot report itself
        if self._reports_itself or is_leader_lost:
            self._output.show_failure(
                failure,
                attempt=self._attempt_number,
                is_multi_node=self._spec.spans_nodes,
                is_verbose=self._spec.is_verbose,
            )
        who = f"node {failure.node_rank}" if failure.rank is None else f"rank {failure.rank}"
        self._emit("lost", detail=f"{who}: {failure.cause}")

    def _emit(self, action: str, *, detail: str | None = None) -> None:
        # Imported here: it takes a while, and the first worker does not wait for it.
        from torsh_distributed.events import MembershipEvent, emit

        emit(
            MembershipEvent(
                action=action, world_size=self._spec.world_size, attempt=self._attempt_number, detail=detail
            )
        )

    def _revive_guardian(self) -> None:
        """The guardian was killed: start another, unless that keeps happening."""
        self._loop.unwatch(self._guardian.pidfd)
        if self._num_revived >= _MAX_REVIVALS:
            self._output.warn("the guardian was killed again; if this launcher is killed too, workers may survive it")
            return
        self._num_revived += 1
        self._guardian.revive()
        self._loop.watch(self._guardian.pidfd, self._revive_guardian)

    def _close_attempt(self) -> None:
        if self._health is not None:
            self._health.close()
            self._health = None
        if self._leaving is not None:
            self._leaving.close()
            self._leaving = None
        if self._attempt is not None:
            self._attempt.close()
            self._attempt = None

    def close(self) -> None:
        """End every process of the job on this node, then the guardian."""
        self._close_attempt()
        if self._energy is not None:
            self._energy.close()
        self._observer.close()
        self._gpus.close()
        if self._spare is not None:
            self._spare.close()
        shutil.rmtree(self.directory, ignore_errors=True)
        if self._kept_memory is not None:
            shutil.rmtree(self._kept_memory, ignore_errors=True)
        self._loop.unwatch(self._guardian.pidfd)
        self._guardian.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _spare(spec: JobSpec, loop: Loop, guardian: Guardian, output: LauncherOutput) -> SpareProcess | None:
    if not spec.keeps_spare:
        return None
    variables = {"OMP_NUM_THREADS": "1"} if sets_omp_threads(spec, os.environ) else {}
    return SpareProcess(loop, guardian, output, variables={**variables, **spec.env})


def _ignore(message: FromNode) -> None:
    """Before the leader is known, reports go nowhere."""
