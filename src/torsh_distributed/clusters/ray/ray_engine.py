"""Scripts on a Ray cluster, through its job submission server: the job lives there, and any process may ask for it.

Ray keeps the job's driver, its log and its state; the driver (`ray_job`) holds the ranks. It speaks HTTP to the
dashboard's port, so that submitting needs no network of the cluster's own.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from torsh_distributed.clusters.base import ClusterEngine, JobState, JobStatus
from torsh_distributed.clusters.engine_options import is_set, require_known_options
from torsh_distributed.clusters.hosted.submitted_job import job_values
from torsh_distributed.clusters.ray.ray_connection import INSTALL_HINT, lacks_package, own_token, require_ray
from torsh_distributed.clusters.submission import Submission, parse_memory
from torsh_distributed.errors import (
    CommunicationError,
    FeatureNotAvailable,
    InvalidArgument,
    IoError,
    OperationTimeout,
    first_line,
)

JOB_VARIABLE = "TORSH_RAY_JOB"
OPTIONS = {
    "address": "the job server, as http://HOST:8265; default: RAY_API_SERVER_ADDRESS, or a cluster on this machine",
    "placement": "PACK, SPREAD, STRICT_PACK or STRICT_SPREAD",
    "resources": "custom resources of each worker, as name:amount,name:amount",
    "runtime_env": "a JSON file with Ray's runtime environment; the working directory is added to it",
    "python": "the interpreter on the cluster; default: python",
    "start_timeout_s": "how long the cluster may take to give the workers",
    "waits_for_nodes": "yes: wait for an autoscaler",
    "own_interpreters": "yes: each rank imports torch, instead of being forked from a process that has",
}
_STATES = {
    "PENDING": JobState.QUEUED,
    "RUNNING": JobState.RUNNING,
    "SUCCEEDED": JobState.SUCCEEDED,
    "FAILED": JobState.FAILED,
    "STOPPED": JobState.CANCELLED,
}
_LOOK_AGAIN_S = 0.25
_LOOKS_PER_STATE = 3
_OWN_MACHINE = "http://127.0.0.1:8265"
_AGENT_S = 60.0
_NO_AGENT = "No available agent"
_CANCEL_S = 60.0
_SCALE_S = 60.0


class RayEngine(ClusterEngine):
    """One Ray cluster, by its job submission server."""

    def __init__(self, options: Mapping[str, str] | None = None) -> None:
        self._options = dict(options or {})
        require_known_options("ray", self._options, OPTIONS)
        require_ray()
        self._job_server: Any = None

    @override
    def render(self, submission: Submission) -> str:
        """The entry point, the runtime environment and the job as the driver reads it."""
        runtime_env = self._runtime_env(submission, submission.name)
        job = json.loads(runtime_env["env_vars"].pop(JOB_VARIABLE))
        hidden = dict.fromkeys(job.pop("env"), "…")
        shown = {"entrypoint": self._entry_point(), "runtime_env": runtime_env, "job": {**job, "env": hidden}}
        return json.dumps(shown, indent=2, ensure_ascii=False)

    @override
    def submit(self, submission: Submission) -> str:
        """Upload the working directory and start the job's driver on the cluster."""
        job_id = f"{submission.name}-{secrets.token_hex(3)}"
        client, pause, deadline_s = self._client(), threading.Event(), time.monotonic() + _AGENT_S
        while True:
            try:
                return str(
                    client.submit_job(
                        entrypoint=self._entry_point(),
                        submission_id=job_id,
                        runtime_env=self._runtime_env(submission, job_id),
                        metadata={"job_name": submission.name},
                    )
                )
            except (RuntimeError, OSError, ValueError) as error:
                is_starting = _NO_AGENT in str(error)  # a cluster that has just come up
                if is_starting and time.monotonic() < deadline_s:
                    pause.wait(_LOOK_AGAIN_S)
                    continue
                raise CommunicationError(
                    "Ray did not take the job",
                    hint="no node runs jobs yet, or another Ray on its machine has its agent's port (52365)"
                    if is_starting
                    else "a working directory of more than 500 MiB is refused: exclude data with a runtime_env",
                    operation="submit",
                    reason=first_line(error),
                ) from error

    @override
    def found_at(self) -> dict[str, str]:
        """Where the job server is: Ray looks for one that is gone for most of a minute."""
        return {"address": str(self._client().get_address())}

    @override
    def status(self, job_id: str) -> JobStatus:
        """As Ray's job server tells it."""
        info = self._info(self._client(), job_id)
        if info is None:
            return JobStatus(state=JobState.LOST, detail="the cluster does not know this job")
        state = _STATES.get(str(info.status.value), JobState.LOST)
        detail = str(info.message or "")
        if state is JobState.FAILED and lacks_package(detail):
            python = self._options.get("python", "python")
            detail = f"the cluster's {python} has no torsh-distributed: {INSTALL_HINT}; or name another: --set python=…"
        return JobStatus(state=state, detail=detail, exit_code=_exit_code(state, info))

    @override
    def logs(self, job_id: str, *, follow: bool = False) -> Iterator[str]:
        """The driver's output, which shows the lines of all ranks."""
        client, pause, num_shown, num_looks = self._client(), threading.Event(), 0, 0
        is_over = False
        while True:
            # Not every time: two processes of the head work on each question, and they share it with ranks.
            if num_looks % _LOOKS_PER_STATE == 0:
                info = self._info(client, job_id)
                is_over = info is None or _STATES.get(str(info.status.value), JobState.LOST).is_over
                if info is None:
                    return
            num_looks += 1
            lines = client.get_job_logs(job_id).split("\n")
            # The last piece may still grow, unless nothing more comes.
            complete = lines if is_over or not follow else lines[:-1]
            for line in complete[num_shown:]:
                if line or complete[-1] is not line:
                    yield line
            num_shown = max(num_shown, len(complete))
            if is_over or not follow:
                return
            pause.wait(_LOOK_AGAIN_S)

    @override
    def cancel(self, job_id: str) -> None:
        """Stop the driver, which ends the ranks; then wait until Ray says so."""
        client = self._client()
        info = self._info(client, job_id)
        if info is None or _STATES.get(str(info.status.value), JobState.LOST).is_over:
            return
        client.stop_job(job_id)
        self._await(client, job_id, _CANCEL_S, operation="cancel")

    @override
    def scale(self, job_id: str, workers: int) -> None:
        """Tell the job's leader, by a small job of its own: it has the cluster's network, this process need not."""
        client = self._client()
        helper = client.submit_job(
            entrypoint=f"{self._entry_point()} scale {job_id} {int(workers)}",
            submission_id=f"{job_id}-scale-{secrets.token_hex(3)}",
        )
        info = self._await(client, helper, _SCALE_S, operation="scale")
        if _STATES.get(str(info.status.value)) is not JobState.SUCCEEDED:
            lines = [line for line in str(client.get_job_logs(helper)).splitlines() if line.strip()]
            raise FeatureNotAvailable(
                f"the size of the job {job_id!r} cannot be changed",
                hint="submit it with --elastic; it must be running",
                reason=lines[-1] if lines else str(info.message),
            )

    # Ray's job server

    def _client(self) -> Any:
        if self._job_server is None:
            self._job_server = self._open()
        return self._job_server

    def _open(self) -> Any:
        from ray.exceptions import RayError
        from ray.job_submission import JobSubmissionClient

        address = self._options.get("address")
        try:
            return JobSubmissionClient(address)
        except (ConnectionError, RuntimeError, OSError, ValueError) as error:
            raise _no_server(address, error) from error
        except RayError as error:
            # Ray sends a token under RAY_AUTH_MODE=token alone, but `ray start` asks for one wherever one is there.
            token = None if "RAY_AUTH_MODE" in os.environ else own_token()
            if token is None:
                raise _no_server(address, error) from error
        try:
            return JobSubmissionClient(address or _OWN_MACHINE, headers={"Authorization": f"Bearer {token}"})
        except (ConnectionError, RuntimeError, OSError, ValueError, RayError) as error:
            raise _no_server(address, error) from error

    def _info(self, client: Any, job_id: str) -> Any:
        """What the server knows of the job; None if nothing."""
        try:
            return client.get_job_info(job_id)
        except RuntimeError as error:
            if "404" in str(error) or "does not exist" in str(error):
                return None
            raise CommunicationError(
                "Ray's job server did not answer", hint="`ray status` on the head says more", reason=str(error)
            ) from error

    def _await(self, client: Any, job_id: str, timeout_s: float, *, operation: str) -> Any:
        pause, deadline_s = threading.Event(), time.monotonic() + timeout_s
        while True:
            info = self._info(client, job_id)
            if info is None or _STATES.get(str(info.status.value), JobState.LOST).is_over:
                return info
            if time.monotonic() > deadline_s:
                raise OperationTimeout(
                    f"the job {job_id!r} did not end within {timeout_s:g} s",
                    hint="look at the dashboard, or stop it with `ray job stop`",
                    operation=operation,
                )
            pause.wait(_LOOK_AGAIN_S)

    # What is submitted

    def _entry_point(self) -> str:
        return f"{self._options.get('python', 'python')} -m torsh_distributed.clusters.ray.ray_job"

    def _runtime_env(self, submission: Submission, job_id: str) -> dict[str, Any]:
        chosen: dict[str, Any] = {}
        if "runtime_env" in self._options:
            chosen = _read_json(Path(self._options["runtime_env"]))
        chosen.setdefault("working_dir", str(submission.working_dir))
        variables = {**chosen.get("env_vars", {}), JOB_VARIABLE: json.dumps(self._job(submission, job_id))}
        return {**chosen, "env_vars": variables}

    def _job(self, submission: Submission, job_id: str) -> dict[str, Any]:
        options, memory = self._options, submission.memory_per_worker
        return {
            **job_values(submission, job_id, own_interpreters=is_set(options, "own_interpreters")),
            "config": {
                "cpus_per_worker": submission.cpus_per_worker,
                "gpus_per_worker": submission.gpus_per_worker,
                "memory_per_worker_bytes": None if memory is None else parse_memory(memory),
                "resources_per_worker": _parse_resources(options.get("resources", "")),
                "placement": options.get("placement", "PACK" if submission.nodes == 1 else "SPREAD"),
                "start_timeout_s": float(options.get("start_timeout_s", 120.0)),
                "waits_for_nodes": is_set(options, "waits_for_nodes"),
            },
        }


def _no_server(address: str | None, error: Exception) -> CommunicationError:
    reason = first_line(error)
    where = address or "this machine"
    if type(error).__name__ == "AuthenticationError":
        return CommunicationError(
            f"the Ray cluster at {where} asks for a token, and has not got the right one",
            hint="put its token into ~/.ray/auth_token or RAY_AUTH_TOKEN; RAY_AUTH_MODE is `token` or not set",
            address=address,
            reason=reason,
        )
    return CommunicationError(
        f"no Ray job server answers at {where}",
        hint="start the head with its dashboard: `ray start --head --include-dashboard=true` "
        '(pip install "ray[default]"), and give --set address=http://HOST:8265',
        address=address,
        reason=reason,
    )


def _exit_code(state: JobState, info: Any) -> int | None:
    if state is JobState.SUCCEEDED:
        return 0
    code = getattr(info, "driver_exit_code", None)
    return code if isinstance(code, int) else None


def _parse_resources(text: str) -> dict[str, float]:
    found = {}
    for part in filter(None, text.split(",")):
        name, _, amount = part.partition(":")
        try:
            found[name.strip()] = float(amount or 1)
        except ValueError:
            raise InvalidArgument("resources must read name:amount,name:amount", got=text) from None
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise IoError("the runtime environment cannot be read", path=str(path), reason=str(error)) from error
    if not isinstance(value, dict):
        raise InvalidArgument("a runtime environment is a JSON object", path=str(path))
    return value
