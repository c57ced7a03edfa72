"""A client of a Dask cluster, from whatever the user has: a client, a cluster object or an address."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from torsh_distributed.errors import CommunicationError, FeatureNotAvailable, InvalidArgument

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


_CONNECT_S = 30.0


def require_dask() -> Any:
    """The package `distributed`; raises FeatureNotAvailable with the line that installs it."""
    try:
        import distributed
    except ImportError as error:
        raise FeatureNotAvailable(
            "dask.distributed is not installed", hint='pip install "torsh-distributed[dask]"', reason=str(error)
        ) from error
    return distributed


@contextmanager
def client_of(where: Any, *, timeout_s: float = _CONNECT_S) -> Iterator[Any]:
    """A client of the cluster: the user's own, or one that lasts as long as this block.

    `where`: a `distributed.Client`; any cluster object, as LocalCluster, dask-jobqueue's and dask-kubernetes' are; or
    the scheduler's address.
    """
    distributed = require_dask()
    if isinstance(where, distributed.Client):
        if where.asynchronous:
            raise InvalidArgument(
                "the Dask client is asynchronous, and a job blocks until it ends",
                hint="pass the cluster or its scheduler_address; call this from a thread",
            )
        yield where
        return
    address = where if isinstance(where, str) else getattr(where, "scheduler_address", None)
    if not address:
        raise InvalidArgument(
            "a Dask client, a cluster or the address of a scheduler is needed",
            hint="for example Client(cluster), LocalCluster() or 'tcp://10.0.0.1:8786'",
            got=type(where).__name__,
        )
    security = getattr(where, "security", None)
    _require_listener(address, timeout_s)
    try:
        client = distributed.Client(address, timeout=timeout_s, security=security or None, set_as_default=False)
    except (OSError, TimeoutError) as error:
        raise _no_scheduler(address, error) from error
    try:
        yield client
    finally:
        client.close()


def _require_listener(address: str, timeout_s: float) -> None:
    """Raise if nobody listens there: a client that fails to connect leaves its thread behind."""
    found = urlsplit(address)
    if found.scheme not in ("tcp", "tls") or not found.hostname or not found.port:
        return
    try:
        socket.create_connection((found.hostname, found.port), timeout=timeout_s).close()
    except OSError as error:
        raise _no_scheduler(address, error) from error


def _no_scheduler(address: str, error: Exception) -> CommunicationError:
    return CommunicationError(
        f"no Dask scheduler answers at {address}",
        hint="check the address and the port (8786, not the dashboard's 8787), and TLS on both sides",
        address=address,
        reason=str(error),
    )
