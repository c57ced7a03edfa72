"""What SLURM says about a job: scontrol while it remembers the job, sacct where accounting is set up."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from torsh_distributed.clusters.cluster_engine import JobState, JobStatus
from torsh_distributed.errors import CommunicationError, OperationTimeout

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
        # 0 with a state that is no success, such as a time limit: there was no exit code to keep.
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
