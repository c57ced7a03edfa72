"""SLURM as an engine: sbatch, scontrol, scancel, and the job's own files."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from torsh_distributed.clusters.base import ClusterEngine, JobState, JobStatus
from torsh_distributed.clusters.engine_options import require_known_options
from torsh_distributed.clusters.engine_programs import ask_program, fixed_size, required_program
from torsh_distributed.clusters.job_records import (
    all_records,
    job_directory,
    read_growing,
    write_private,
)
from torsh_distributed.clusters.ranks.rank_reports import job_variables, rank_command, report_directory, with_cause
from torsh_distributed.clusters.slurm.slurm_script import OPTIONS, slurm_script
from torsh_distributed.clusters.submission import Submission
from torsh_distributed.comm.trust.job_secret import new_secret, write_secret_file
from torsh_distributed.errors import CommunicationError, FeatureNotAvailable, IoError, OperationTimeout
from torsh_distributed.launch.ports import meeting_variables, require_port_limit
from torsh_distributed.launch.spec import parse_port_range
from torsh_distributed.private_files import state_directory
from torsh_distributed.unreadable_data import unreadable_as

ASK_TIMEOUT_S = 30.0
_STATES = {
    "PENDING": JobState.QUEUED,
    "CONFIGURING": JobState.QUEUED,
    "REQUEUED": JobState.QUEUED,
    "REQUEUE_FED": JobState.QUEUED,
    "REQUEUE_HOLD": JobState.QUEUED,
    "SPECIAL_EXIT": JobState.QUEUED,
    "RUNNING": JobState.RUNNING,
    "COMPLETING": JobState.RUNNING,
    "SUSPENDED": JobState.RUNNING,
    "STOPPED": JobState.RUNNING,
    "SIGNALING": JobState.RUNNING,
    "STAGE_OUT": JobState.RUNNING,
    "RESIZING": JobState.RUNNING,
    "COMPLETED": JobState.SUCCEEDED,
    "CANCELLED": JobState.CANCELLED,
    "FAILED": JobState.FAILED,
    "TIMEOUT": JobState.FAILED,
    "NODE_FAIL": JobState.FAILED,
    "OUT_OF_MEMORY": JobState.FAILED,
    "BOOT_FAIL": JobState.FAILED,
    "DEADLINE": JobState.FAILED,
    "PREEMPTED": JobState.FAILED,
    "REVOKED": JobState.FAILED,
}
_NEVER_STARTS = {
    "launch_failed_requeued_held": "a node could not start it: its slurmd log says why; then `scontrol release` it",
    "JobHeldUser": "its user holds it: `scontrol release` it",
    "JobHeldAdmin": "an administrator holds it",
    "DependencyNeverSatisfied": "the job that it waits for did not end as asked",
}
"""Reasons for which a job waits until somebody does something, in words."""
_FIELD = re.compile(r"(?:^| )([A-Za-z/:]+)=(\S*)")
_FORGOTTEN = ("Invalid job id specified", "Invalid job array")


@dataclass(frozen=True, kw_only=True, slots=True)
class QueuedTask:
    """One job of SLURM, or one task of an array."""

    state: str
    reason: str
    exit_code: int
    signal: int

    @property
    def shell_code(self) -> int:
        """As a shell would show it."""
        return 128 + self.signal if self.signal else self.exit_code


def parse_scontrol(text: str) -> list[QueuedTask]:
    """The jobs of `scontrol show job -o`, one a line."""
    tasks = []
    for line in text.splitlines():
        fields = dict(_FIELD.findall(line))
        if "JobState" not in fields:
            continue
        code, _, number = fields.get("ExitCode", "0:0").partition(":")
        tasks.append(
            QueuedTask(
                state=fields["JobState"],
                reason=fields.get("Reason", "None"),
                exit_code=int(code),
                signal=int(number or 0),
            )
        )
    return tasks


def parse_sacct(text: str) -> list[QueuedTask]:
    """The jobs of `sacct -X -n -P -o State,ExitCode,Reason`, one a line. `CANCELLED by 1000` is CANCELLED."""
    tasks = []
    for line in text.splitlines():
        state, code, reason = (*line.split("|"), "", "")[:3]
        number, _, sent = code.partition(":")
        if state:
            tasks.append(
                QueuedTask(
                    state=state.split()[0], reason=reason or "None", exit_code=int(number or 0), signal=int(sent or 0)
                )
            )
    return tasks


def combine(tasks: Sequence[QueuedTask]) -> JobStatus:
    """One status for all tasks of an array: it runs while one runs, and fails if one failed."""
    known = [(_STATES.get(task.state, JobState.RUNNING), task) for task in tasks]
    for state in (JobState.RUNNING, JobState.QUEUED, JobState.FAILED, JobState.CANCELLED, JobState.SUCCEEDED):
        found = [task for one, task in known if one is state]
        if not found:
            continue
        task = found[0]
        said = task.state if task.reason in ("None", "(null)", "") else f"{task.state}, {task.reason}"
        if task.reason in _NEVER_STARTS:
            said += f" ({_NEVER_STARTS[task.reason]})"
        count = f"{len(found)} of {len(tasks)} tasks {said}" if len(tasks) > 1 else said
        # 0 with a state that is not a success, such as a time limit: there was no exit code to keep.
        code = (task.shell_code or 1) if state in (JobState.FAILED, JobState.CANCELLED) else 0
        return JobStatus(state=state, detail=count, exit_code=code if state.is_over else None)
    return JobStatus(state=JobState.LOST, detail="SLURM does not know the job")


def ask_slurm(job_id: str) -> JobStatus:
    """Where the job stands; LOST if SLURM has forgotten it. Raises if the controller does not answer."""
    code, out, err = _ask(["scontrol", "--oneliner", "show", "job", job_id])
    if code == 0:
        return combine(parse_scontrol(out))
    if not any(text in err + out for text in _FORGOTTEN):
        raise CommunicationError(
            f"SLURM does not answer: {(err or out).strip()}",
            hint="`scontrol ping` says whether the controller runs; SLURM_CONF names its configuration",
            operation="scontrol",
        )
    if shutil.which("sacct") is not None:
        code, out, _ = _ask(["sacct", "-X", "-n", "-P", "-j", job_id, "-o", "State,ExitCode,Reason"])
        # Without slurmdbd it fails, or prints nothing: then nobody knows any more.
        if code == 0 and out.strip():
            return combine(parse_sacct(out))
    return JobStatus(state=JobState.LOST, detail="SLURM does not know the job any more")


def _ask(command: Sequence[str]) -> tuple[int, str, str]:
    try:
        done = subprocess.run(list(command), capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise OperationTimeout(
            f"`{command[0]}` did not answer within {ASK_TIMEOUT_S:g} s",
            hint="`scontrol ping` says whether the controller runs",
            operation=command[0],
        ) from None
    return done.returncode, done.stdout, done.stderr


_LABEL = re.compile(r"\s*(\d+): ?(.*)")
_CANCEL_TIMEOUT_S = 90.0
_LOOK_AGAIN_S = 0.5
_SCRIPT, _TOKEN = "job.sh", "token"
_CLIENT = "submit from a machine with SLURM's client programs, such as a login node"


class SlurmEngine(ClusterEngine):
    """Batch jobs. The job's directory must be on a file system that the nodes share, as home directories are."""

    def __init__(self, options: Mapping[str, str]) -> None:
        require_known_options("slurm", options, OPTIONS)
        self._options = dict(options)

    @override
    def render(self, submission: Submission) -> str:
        """The batch script, with the names of the user's variables in place of their values."""
        folder = state_directory() / "jobs" / submission.name
        hidden = dataclasses.replace(submission, env=dict.fromkeys(submission.env, "…"))
        return self._script(hidden, folder)

    @override
    def submit(self, submission: Submission) -> str:
        required_program("sbatch", hint=_CLIENT)
        folder = job_directory(submission.name)
        report_directory(folder)
        write_secret_file(folder / _TOKEN, new_secret())
        script = folder / _SCRIPT
        write_private(script, self._script(submission, folder))
        try:
            # First without submitting: a job that fits no node would be taken, and wait for ever.
            ask_program(["sbatch", "--test-only", str(script)], timeout_s=ASK_TIMEOUT_S, hint="")
            said = ask_program(["sbatch", "--parsable", str(script)], timeout_s=ASK_TIMEOUT_S, hint="")
        except CommunicationError as error:
            error.hint = _available()
            raise
        return said.strip().split(";")[0]

    def _script(self, submission: Submission, folder: Path) -> str:
        if submission.elastic is not None:
            raise FeatureNotAvailable(
                "a job on 'slurm' has the size of its allocation and cannot be elastic",
                hint="leave out --elastic; a job that is preempted saves and is queued again",
            )
        env = job_variables(submission, reports=folder / "reports", secret_file=folder / _TOKEN)
        if "port_range" in self._options:
            require_port_limit()
            env = {**env, **meeting_variables(parse_port_range(self._options["port_range"]), env)}
        command = rank_command(submission)
        return slurm_script(submission, self._options, folder=folder, command=command, env=env)

    @override
    def status(self, job_id: str) -> JobStatus:
        found = ask_slurm(job_id)
        folder = _folder_of(job_id)
        if folder is None:
            return found
        if found.state is JobState.LOST:
            found = _remembered(folder) or found
        return with_cause(found, folder / "reports")

    @override
    def logs(self, job_id: str, *, follow: bool = False) -> Iterator[str]:
        folder = _folder_of(job_id)
        if folder is None:
            raise CommunicationError(
                f"the output of job {job_id} is not known here",
                hint="only jobs that were submitted with `torsh submit` by this user have it",
                job=job_id,
            )
        lines = read_growing(
            lambda: sorted(folder.glob("output*.log")),
            follow=follow,
            is_over=lambda: ask_slurm(job_id).state.is_over,
            interval_s=_LOOK_AGAIN_S,
        )
        return (_with_rank(line) for line in lines)

    @override
    def cancel(self, job_id: str) -> None:
        required_program("scancel", hint=_CLIENT)
        folder = _folder_of(job_id)
        if folder is not None:
            # Ranks that save when they are told to end must not bring the job back.
            (folder / "cancelled").touch(mode=0o600)
        if ask_slurm(job_id).state.is_over:
            return
        ask_program(["scancel", job_id], timeout_s=ASK_TIMEOUT_S, hint="`scontrol ping`")
        deadline = time.monotonic() + _CANCEL_TIMEOUT_S
        pause = threading.Event()
        while not _has_ended(job_id):
            if time.monotonic() > deadline:
                raise OperationTimeout(
                    f"job {job_id} still runs {_CANCEL_TIMEOUT_S:g} s after scancel",
                    hint="look at KillWait and UnkillableStepTimeout of the cluster; `squeue` shows its state",
                    operation="cancel",
                )
            pause.wait(_LOOK_AGAIN_S)

    @override
    def scale(self, job_id: str, workers: int) -> None:
        raise fixed_size("slurm")


def _has_ended(job_id: str) -> bool:
    """Whether no process of it is left: a cancelled job is shown as such before its nodes are clean."""
    command = ["squeue", "--noheader", "--jobs", job_id, "--states=all", "--format=%T"]
    queued = ask_program(command, timeout_s=ASK_TIMEOUT_S, hint="`scontrol ping` says whether the controller runs")
    return not any(state in ("COMPLETING", "RUNNING", "PENDING") for state in queued.split())


def _folder_of(job_id: str) -> Path | None:
    """The directory of the job, found by its record; None for a job that was not submitted from here."""
    base = job_id.partition("_")[0]
    for record in all_records():
        if record.engine == "slurm" and record.job_id.partition("_")[0] == base:
            return state_directory() / "jobs" / record.name
    return None


def _remembered(folder: Path) -> JobStatus | None:
    """How the job ended, from what its script wrote; None if it wrote nothing."""
    with unreadable_as(IoError, "what the job's script wrote about its end cannot be read", path=str(folder)):
        codes = [int(json.loads(path.read_bytes())["exit_code"]) for path in sorted(folder.glob("exit*.json"))]
    if not codes:
        return None
    code = next((code for code in codes if code), 0)
    state = JobState.FAILED if code else JobState.SUCCEEDED
    if code and (folder / "cancelled").exists():
        state = JobState.CANCELLED
    return JobStatus(state=state, exit_code=code, detail="SLURM has forgotten it; this is what its script wrote down")


def _with_rank(line: str) -> str:
    """srun's label as `torsh run` shows it."""
    match = _LABEL.fullmatch(line)
    return line if match is None else f"[rank {match[1]}] {match[2]}"


def _available() -> str:
    """What the cluster has, in one line; or that it does not answer."""
    command = ["sinfo", "--noheader", "--format=%P: %D nodes %t, %c CPUs, %m MB, gres %G"]
    try:
        said = ask_program(command, timeout_s=ASK_TIMEOUT_S, hint="`scontrol ping` says whether the controller runs")
    except (CommunicationError, OperationTimeout, FileNotFoundError):
        return "SLURM does not answer here: `scontrol ping` says why, and SLURM_CONF names another slurm.conf"
    return f"what there is: {'; '.join(said.splitlines()) or 'nothing'}"
