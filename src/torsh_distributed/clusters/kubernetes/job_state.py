"""Where a job stands, read from its object and its pods. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from torsh_distributed.clusters.base import JobState, JobStatus
from torsh_distributed.clusters.kubernetes.pod_template import Manifest

# The words of Job, JobSet, TrainJob and PyTorchJob for the same two ends.
_DONE = ("Complete", "Completed", "Succeeded")
_FAILED = ("Failed",)
_INDEX_LABELS = ("batch.kubernetes.io/job-completion-index", "training.kubeflow.org/replica-index")


def job_status(job: Manifest, pods: Sequence[Manifest]) -> JobStatus:
    """The state in words that all engines share, with the cluster's own reason."""
    held = {one["type"]: one for one in job.get("status", {}).get("conditions") or [] if one.get("status") == "True"}
    for names, state in ((_DONE, JobState.SUCCEEDED), (_FAILED, JobState.FAILED)):
        found = next((held[name] for name in names if name in held), None)
        if found is not None:
            code = 0 if state is JobState.SUCCEEDED else _first_failure(pods)
            return JobStatus(state=state, detail=_reason(found), exit_code=code)
    if job["metadata"].get("deletionTimestamp"):
        return JobStatus(state=JobState.CANCELLED, detail="it is being removed")
    phases = [pod.get("status", {}).get("phase") for pod in pods]
    if "Running" in phases:
        return JobStatus(state=JobState.RUNNING, detail=f"{phases.count('Running')} of {len(phases)} pods run")
    if is_suspended(job):
        return JobStatus(state=JobState.QUEUED, detail="suspended: a queue has not admitted it yet")
    return JobStatus(state=JobState.QUEUED, detail=next(filter(None, map(_waits_for, pods)), "no pod runs yet"))


def is_suspended(job: Manifest) -> bool:
    """Whether the job may start no pods."""
    spec = job.get("spec", {})
    return bool(spec.get("suspend") or spec.get("runPolicy", {}).get("suspend"))


def pod_order(pod: Manifest) -> tuple[int, str, str]:
    """Sorts pods by node, and those of one node by age."""
    held = pod["metadata"].get("labels") or {}
    index = next((held[name] for name in _INDEX_LABELS if name in held), "0")
    is_worker = held.get("training.kubeflow.org/replica-type") == "worker"
    return int(index) + is_worker, str(pod["metadata"].get("creationTimestamp", "")), str(pod["metadata"]["name"])


def _first_failure(pods: Sequence[Manifest]) -> int | None:
    """The exit code of the container that ended first with an error."""
    ends = [
        (str(ended.get("finishedAt", "")), pod_order(pod), int(ended["exitCode"]))
        for pod in pods
        for container in pod.get("status", {}).get("containerStatuses") or []
        if (ended := container.get("state", {}).get("terminated")) and ended.get("exitCode")
    ]
    return min(ends)[2] if ends else None


def _waits_for(pod: Manifest) -> str | None:
    """Why a pod does not run: no place, no image."""
    status = pod.get("status", {})
    for container in status.get("containerStatuses") or []:
        waiting = container.get("state", {}).get("waiting")
        if waiting and waiting.get("reason") not in (None, "ContainerCreating"):
            return f"pod {pod['metadata']['name']}: {_reason(waiting)}"
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"pod {pod['metadata']['name']}: {_reason(condition)}"
    return None


def _reason(found: Manifest) -> str:
    return ": ".join(str(found[key]) for key in ("reason", "message") if found.get(key))
