"""Drivers of submitted jobs, in the scheduler's process; called by `client.run_on_scheduler`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JOB_VARIABLE = "TORSH_DASK_JOB"
_MAX_CHUNK_BYTES = 1 << 20
_MAX_KEPT = 100
"""Jobs that are over and can still be asked for; the oldest are forgotten first."""


@dataclass
class _SchedulerJob:
    process: subprocess.Popen[bytes]
    log: Path
    folder: tempfile.TemporaryDirectory[str]
    is_cancelled: bool = False


_jobs: dict[str, _SchedulerJob] = {}


def start_job(job_id: str, job: str, dask_scheduler: Any = None) -> None:
    """Start the driver of a job; its output goes to a file of the scheduler's user alone."""
    over = [known for known, one in _jobs.items() if one.process.poll() is not None]
    for known in over[: max(0, len(over) - _MAX_KEPT + 1)]:
        _jobs.pop(known).folder.cleanup()
    folder = tempfile.TemporaryDirectory(prefix="torsh-dask-job-")
    log = Path(folder.name) / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "torsh_distributed.clusters.dask.dask_job", dask_scheduler.address],
            env={**os.environ, JOB_VARIABLE: job},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _jobs[job_id] = _SchedulerJob(process, log, folder)


def look_at_job(job_id: str, at_byte: int) -> dict[str, Any]:
    """Where a job stands, and its output from a position on."""
    job = _jobs.get(job_id)
    if job is None:
        return {"is_known": False, "exit_code": None, "is_cancelled": False, "text": "", "at_byte": at_byte}
    # Asked before reading: what was written before the end is then in the text.
    code = job.process.poll()
    with job.log.open("rb") as file:
        file.seek(at_byte)
        data = file.read(_MAX_CHUNK_BYTES)
    is_whole = len(data) < _MAX_CHUNK_BYTES
    return {
        "is_known": True,
        "exit_code": (code if code is None or code >= 0 else 128 - code) if is_whole else None,
        "is_cancelled": job.is_cancelled,
        "text": data.decode(errors="replace"),
        "at_byte": at_byte + len(data),
    }


def end_job(job_id: str) -> dict[str, Any]:
    """Tell the driver to end; where the job stands then."""
    job = _jobs.get(job_id)
    if job is not None and job.process.poll() is None:
        job.is_cancelled = True
        os.killpg(job.process.pid, signal.SIGTERM)
    return look_at_job(job_id, 0)
