"""What scontrol and sacct print, read into one status."""

from __future__ import annotations

import pytest

from torsh_distributed.clusters.base import JobState
from torsh_distributed.clusters.slurm.slurm_engine import combine, parse_sacct, parse_scontrol

LINE = (
    "JobId={id} JobName=x UserId=root(0) JobState={state} Reason={reason} Dependency=(null) Requeue=1 "
    "ExitCode={code} RunTime=00:00:03 Command=/a b/JobState=FAILED.sh Comment=JobState "
)


def status(*tasks: tuple[str, str, str]) -> tuple[JobState, int | None, str]:
    text = "\n".join(LINE.format(id=7, state=state, reason=reason, code=code) for state, reason, code in tasks)
    found = combine(parse_scontrol(text))
    return found.state, found.exit_code, found.detail


@pytest.mark.parametrize(
    ("task", "state", "code", "detail"),
    [
        (("PENDING", "Resources", "0:0"), JobState.QUEUED, None, "PENDING, Resources"),
        (("RUNNING", "None", "0:0"), JobState.RUNNING, None, "RUNNING"),
        (("COMPLETING", "None", "0:0"), JobState.RUNNING, None, "COMPLETING"),
        (("COMPLETED", "None", "0:0"), JobState.SUCCEEDED, 0, "COMPLETED"),
        (("FAILED", "NonZeroExitCode", "3:0"), JobState.FAILED, 3, "FAILED, NonZeroExitCode"),
        (("FAILED", "None", "0:9"), JobState.FAILED, 137, "FAILED"),
        (("TIMEOUT", "TimeLimit", "0:0"), JobState.FAILED, 1, "TIMEOUT, TimeLimit"),
        (("CANCELLED", "None", "0:15"), JobState.CANCELLED, 143, "CANCELLED"),
    ],
)
def test_a_state_of_slurm_is_one_of_ours(
    task: tuple[str, str, str], state: JobState, code: int | None, detail: str
) -> None:
    assert status(task) == (state, code, detail)


def test_a_job_that_waits_for_somebody_says_for_what() -> None:
    state, _, detail = status(("PENDING", "launch_failed_requeued_held", "0:0"))
    assert state is JobState.QUEUED
    assert "a node could not start it: its slurmd log says why; then `scontrol release` it" in detail


def test_an_array_runs_while_a_task_runs_and_fails_if_one_failed() -> None:
    done, failed, running = ("COMPLETED", "None", "0:0"), ("FAILED", "None", "2:0"), ("RUNNING", "None", "0:0")
    assert status(done, failed, running) == (JobState.RUNNING, None, "1 of 3 tasks RUNNING")
    assert status(done, failed, done) == (JobState.FAILED, 2, "1 of 3 tasks FAILED")
    assert status(done, done) == (JobState.SUCCEEDED, 0, "2 of 2 tasks COMPLETED")
    assert status()[0] is JobState.LOST


def test_accounting_is_read_too() -> None:
    found = combine(parse_sacct("CANCELLED by 1000|0:15|None\n"))
    assert (found.state, found.exit_code) == (JobState.CANCELLED, 143)
    assert combine(parse_sacct("")).state is JobState.LOST
