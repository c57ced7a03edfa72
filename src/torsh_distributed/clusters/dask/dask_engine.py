"""Scripts on a Dask cluster: the job's driver is a child of the scheduler, which any process can ask about it.

Dask has no jobs that outlive their client. The scheduler lives as long as the cluster, so it keeps the driver
(`dask_job`): its process, its log and its exit code.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from typing_extensions import override

from torsh_distributed.clusters.base import ClusterEngine, JobState, JobStatus
from torsh_distributed.clusters.dask.dask_connection import client_of, end_job, look_at_job, require_dask, start_job
from torsh_distributed.clusters.engine_options import is_set, require_known_options
from torsh_distributed.clusters.hosted.submitted_job import job_values
from torsh_distributed.clusters.submission import Submission
from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument, OperationTimeout

OPTIONS = {
    "address": "the scheduler, as tcp://HOST:8786; default: dask's own setting `scheduler-address`",
    "start_timeout_s": "how long the cluster may take to have the workers free",
    "own_interpreters": "yes: each rank imports torch, instead of being forked from a process that has",
}
_LOOK_AGAIN_S = 0.2
_CANCEL_S = 60.0


class DaskEngine(ClusterEngine):
    """One Dask cluster, by its scheduler."""

    def __init__(self, options: Mapping[str, str] | None = None) -> None:
        self._options = dict(options or {})
        require_known_options("dask", self._options, OPTIONS)
        require_dask()

    @override
    def render(self, submission: Submission) -> str:
        """The job as its driver on the scheduler reads it."""
        job = self._job(submission, submission.name)
        return json.dumps({**job, "env": dict.fromkeys(job["env"], "…")}, indent=2, ensure_ascii=False)

    @override
    def submit(self, submission: Submission) -> str:
        """Start the job's driver beside the scheduler."""
        if submission.gpus_per_worker:
            raise FeatureNotAvailable(
                "Dask does not give out GPUs",
                hint="start workers that see one GPU each (dask-cuda), and ask for as many workers",
                gpus_per_worker=submission.gpus_per_worker,
            )
        job_id = f"{submission.name}-{secrets.token_hex(3)}"
        with self._client() as client:
            there = len(client.scheduler_info(n_workers=-1)["workers"])
            least = submission.num_workers if submission.elastic is None else submission.elastic.min_workers
            if there < least:
                raise FeatureNotAvailable(
                    f"{least} workers were asked for, and the Dask cluster has {there}",
                    hint="scale the cluster, or ask for fewer",
                    workers=least,
                )
            client.run_on_scheduler(start_job, job_id, json.dumps(self._job(submission, job_id)))
        return job_id

    @override
    def status(self, job_id: str) -> JobStatus:
        """As the scheduler knows it."""
        with self._client() as client:
            return _status(client.run_on_scheduler(look_at_job, job_id, 0))

    @override
    def logs(self, job_id: str, *, follow: bool = False) -> Iterator[str]:
        """The driver's output, which shows the lines of all ranks."""
        pause, at_byte, rest = threading.Event(), 0, ""
        with self._client() as client:
            while True:
                found = client.run_on_scheduler(look_at_job, job_id, at_byte)
                at_byte = int(found["at_byte"])
                *lines, rest = (rest + str(found["text"])).split("\n")
                yield from lines
                if not follow or _status(found).state.is_over:
                    if rest:
                        yield rest
                    return
                if not lines:
                    pause.wait(_LOOK_AGAIN_S)

    @override
    def cancel(self, job_id: str) -> None:
        """End the driver, which ends the ranks."""
        with self._client() as client:
            found = client.run_on_scheduler(end_job, job_id)
            pause = threading.Event()
            for _ in range(int(_CANCEL_S / _LOOK_AGAIN_S)):
                if _status(found).state.is_over:
                    return
                pause.wait(_LOOK_AGAIN_S)
                found = client.run_on_scheduler(look_at_job, job_id, 0)
        raise OperationTimeout(
            f"the job {job_id!r} did not end within {_CANCEL_S:g} s",
            hint="restart the workers with client.restart()",
            operation="cancel",
        )

    @override
    def scale(self, job_id: str, workers: int) -> None:
        """An elastic job follows the size of its cluster, so it is the cluster that is scaled."""
        raise FeatureNotAvailable(
            "an elastic job on Dask has a rank on every worker of its cluster",
            hint=f"scale the cluster: cluster.scale({workers}); the job {job_id} follows",
            workers=workers,
        )

    @override
    def found_at(self) -> dict[str, str]:
        """Where the scheduler is; the variable that says so may change."""
        return {"address": self._address()}

    def _client(self) -> AbstractContextManager[Any]:
        return client_of(self._address())

    def _address(self) -> str:
        import dask

        address = self._options.get("address") or dask.config.get("scheduler-address", None)
        if not address:
            raise InvalidArgument(
                "the address of the Dask scheduler is not known",
                hint="give --set address=tcp://HOST:8786, or set DASK_SCHEDULER_ADDRESS",
            )
        return str(address)

    def _job(self, submission: Submission, job_id: str) -> dict[str, Any]:
        return {
            **job_values(submission, job_id, own_interpreters=is_set(self._options, "own_interpreters")),
            "working_dir": str(submission.working_dir),
            "config": {"start_timeout_s": float(self._options.get("start_timeout_s", 60.0))},
        }


def _status(found: Mapping[str, Any]) -> JobStatus:
    code = found["exit_code"]
    if not found["is_known"]:
        return JobStatus(state=JobState.LOST, detail="the scheduler does not know this job")
    if code is None:
        return JobStatus(state=JobState.RUNNING)
    if found["is_cancelled"]:
        return JobStatus(state=JobState.CANCELLED, exit_code=code)
    state = JobState.SUCCEEDED if code == 0 else JobState.FAILED
    return JobStatus(state=state, exit_code=code, detail="" if code == 0 else f"exit code {code}")
