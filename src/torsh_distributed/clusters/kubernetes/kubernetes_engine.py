"""`torsh submit --to k8s`: jobs of pods, through the API server."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Iterator, Mapping

import yaml
from typing_extensions import override

from torsh_distributed.clusters.base import ClusterEngine, JobState, JobStatus
from torsh_distributed.clusters.engine_options import require_known_options
from torsh_distributed.clusters.kubernetes.api_server import ApiServer
from torsh_distributed.clusters.kubernetes.cluster_access import find_access
from torsh_distributed.clusters.kubernetes.job_kinds import (
    ELASTIC_ANNOTATION,
    JobObjects,
    job_objects,
    token_secret,
)
from torsh_distributed.clusters.kubernetes.job_state import job_status
from torsh_distributed.clusters.kubernetes.kubernetes_options import JobKind, KubernetesOptions, known_settings
from torsh_distributed.clusters.kubernetes.pod_logs import finished_logs, followed_logs
from torsh_distributed.clusters.kubernetes.pod_template import (
    JOB_LABEL,
    NODES_KEY,
    TOKEN_KEY,
    Manifest,
    has_peers,
    secret_name,
)
from torsh_distributed.clusters.submission import Submission
from torsh_distributed.comm.trust.job_secret import new_secret
from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument, OperationTimeout, TorshError

_KINDS = {
    JobKind.JOB: ("batch/v1", "Job"),
    JobKind.JOBSET: ("jobset.x-k8s.io/v1alpha2", "JobSet"),
    JobKind.TRAINJOB: ("trainer.kubeflow.org/v1alpha1", "TrainJob"),
    JobKind.PYTORCHJOB: ("kubeflow.org/v1", "PyTorchJob"),
}
_END_MARGIN_S = 60.0
"""What the cluster may take to end pods beyond their own grace period."""


class KubernetesEngine(ClusterEngine):
    """Jobs are known as `NAMESPACE/KIND/NAME`. The cluster is the one that kubectl would use."""

    def __init__(self, options: Mapping[str, str]) -> None:
        require_known_options("k8s", options, known_settings())
        self._context = options.get("context")

    @functools.cached_property
    def _server(self) -> ApiServer:
        """Looked up when the first question is asked: rendering asks nobody."""
        return ApiServer(find_access(os.environ, context=self._context))

    @override
    def render(self, submission: Submission) -> str:
        """The manifests in YAML, without the token: a file is not the place for it."""
        objects = job_objects(submission, KubernetesOptions.of(submission))
        return render_manifests(objects, submission)

    @override
    def submit(self, submission: Submission) -> str:
        """Create the job suspended, then what it owns, then let it start: removing the job removes everything."""
        options = KubernetesOptions.of(submission)
        objects = job_objects(submission, options)
        server, namespace = self._server, options.namespace or self._server.namespace
        api, kind = _KINDS[options.kind]
        made: list[Manifest] = []
        try:
            for manifest in objects.before:
                made.append(server.create(manifest, namespace))
            job = server.create(objects.job, namespace)
            made.append(job)
            owner = _owner(job)
            for manifest in objects.before:
                server.change(
                    manifest["apiVersion"],
                    manifest["kind"],
                    namespace,
                    manifest["metadata"]["name"],
                    {"metadata": {"ownerReferences": [owner]}},
                )
            beside = list(objects.beside)
            if has_peers(submission):
                beside.append(token_secret(submission.name, new_secret(), options.namespace))
            for manifest in beside:
                owned = {**manifest, "metadata": {**manifest["metadata"], "ownerReferences": [owner]}}
                made.append(server.create(owned, namespace))
            if not objects.starts_itself:
                server.change(api, kind, namespace, submission.name, _suspension(options.kind, False))
        except BaseException:
            self._undo(made, namespace)
            raise
        return f"{namespace}/{options.kind}/{submission.name}"

    def _undo(self, made: list[Manifest], namespace: str) -> None:
        """Remove what was created; the error that led here is the one to show."""
        for manifest in reversed(made):
            with contextlib.suppress(TorshError):
                self._server.delete(manifest["apiVersion"], manifest["kind"], namespace, manifest["metadata"]["name"])

    @override
    def status(self, job_id: str) -> JobStatus:
        namespace, kind, name = parse_job_id(job_id)
        job = self._server.read(*_KINDS[kind], namespace, name)
        if job is None:
            return JobStatus(state=JobState.LOST, detail="the cluster has no such job: it was removed, or never there")
        return job_status(job, self._pods(namespace, name))

    @override
    def logs(self, job_id: str, *, follow: bool = False) -> Iterator[str]:
        namespace, _, name = parse_job_id(job_id)
        if not follow:
            return finished_logs(self._server, namespace, lambda: self._pods(namespace, name))
        return followed_logs(
            self._server,
            namespace,
            lambda: self._pods(namespace, name),
            is_over=lambda: self.status(job_id).state.is_over,
        )

    @override
    def cancel(self, job_id: str) -> None:
        """Remove the job and all it owns. Its pods have their grace period to save in."""
        namespace, kind, name = parse_job_id(job_id)
        job = self._server.read(*_KINDS[kind], namespace, name)
        if job is None or job_status(job, []).state in (JobState.SUCCEEDED, JobState.FAILED):
            return
        limit_s = self._grace_s(namespace, name) + _END_MARGIN_S
        self._server.delete(*_KINDS[kind], namespace, name)
        # Foreground: the object is there until its pods are gone.
        job = self._server.read(*_KINDS[kind], namespace, name)
        if job is None:
            return
        since = str(job["metadata"].get("resourceVersion", ""))
        selector = f"metadata.name={name}"
        watched = self._server.watch(*_KINDS[kind], namespace, since=since, timeout_s=limit_s, fieldSelector=selector)
        for change, _ in watched:
            if change == "DELETED":
                return
        if self._server.read(*_KINDS[kind], namespace, name) is not None:
            raise _too_slow(namespace, name, limit_s, "cancel")

    @override
    def scale(self, job_id: str, workers: int) -> None:
        """Let all pods save and leave, then start as many as asked for, which go on from the checkpoint."""
        namespace, kind, name = parse_job_id(job_id)
        if kind is not JobKind.JOB:
            raise FeatureNotAvailable(
                f"a {kind} cannot change its size: its pods are fixed when it is created",
                hint="submit it with --set kind=job, or again with another --nodes",
            )
        job = self._server.read(*_KINDS[kind], namespace, name)
        if job is None:
            raise InvalidArgument(f"the cluster has no job {job_id}", hint="`torsh jobs` lists them")
        nodes = nodes_for(workers, (job["metadata"].get("annotations") or {}).get(ELASTIC_ANNOTATION))
        change = self._server.change
        change("batch/v1", "Job", namespace, name, _suspension(kind, True))
        self._wait_for_pods(namespace, name)
        change("v1", "ConfigMap", namespace, name, {"data": {NODES_KEY: str(nodes)}})
        change(
            "batch/v1", "Job", namespace, name, {"spec": {"completions": nodes, "parallelism": nodes, "suspend": False}}
        )

    def _pods(self, namespace: str, name: str) -> list[Manifest]:
        return self._server.find("v1", "Pod", namespace, f"{JOB_LABEL}={name}")[0]

    def _grace_s(self, namespace: str, name: str) -> float:
        pods = self._pods(namespace, name)
        return max((float(pod["spec"].get("terminationGracePeriodSeconds") or 30) for pod in pods), default=0.0)

    def _wait_for_pods(self, namespace: str, name: str) -> None:
        """Until none of the job's pods runs any more."""
        limit_s = self._grace_s(namespace, name) + _END_MARGIN_S
        selector = f"{JOB_LABEL}={name}"
        pods, since = self._server.find("v1", "Pod", namespace, selector)
        running = {pod["metadata"]["name"] for pod in pods if _still_runs(pod)}
        if not running:
            return
        watched = self._server.watch("v1", "Pod", namespace, since=since, timeout_s=limit_s, labelSelector=selector)
        for change, pod in watched:
            if change == "DELETED" or not _still_runs(pod):
                running.discard(pod["metadata"]["name"])
            if not running:
                return
        if any(map(_still_runs, self._pods(namespace, name))):
            raise _too_slow(namespace, name, limit_s, "scale")


def _too_slow(namespace: str, name: str, limit_s: float, operation: str) -> OperationTimeout:
    return OperationTimeout(
        f"pods of {name} still run {limit_s:g} s after they were told to end",
        hint=f"kubectl -n {namespace} get pods -l {JOB_LABEL}={name}",
        operation=operation,
    )


def render_manifests(objects: JobObjects, submission: Submission) -> str:
    """The objects in YAML, in the order in which `kubectl apply` should see them, with the secret's command first."""
    lines = ["# Made by torsh-distributed. The job begins suspended, so that everything is there when its pods start."]
    if has_peers(submission):
        create = f"kubectl create secret generic {secret_name(submission.name)} --from-file={TOKEN_KEY}=/dev/stdin"
        lines += [
            "# The job's secret is not in this file. Create it first:",
            f"#   openssl rand -hex 32 | {create}",
        ]
    kind = objects.job["kind"].lower()
    patch = json.dumps(_suspension(JobKind(kind), False))
    lines += [
        "# Then `kubectl apply -f` this file, and let the job start:",
        f"#   kubectl patch {kind} {submission.name} --type merge -p '{patch}'",
    ]
    documents = yaml.safe_dump_all(objects.all, sort_keys=False, width=120, explicit_start=True)
    return "\n".join(lines) + "\n" + str(documents)


def parse_job_id(job_id: str) -> tuple[str, JobKind, str]:
    """Namespace, kind and name."""
    found = re.fullmatch(r"([a-z0-9-]+)/([a-z]+)/([a-z0-9-]+)", job_id)
    if found is None or found[2] not in set(JobKind):
        raise InvalidArgument(
            "a job on Kubernetes is called NAMESPACE/KIND/NAME", hint="as `torsh submit` printed it", job=job_id
        )
    return found[1], JobKind(found[2]), found[3]


def nodes_for(workers: int, annotation: str | None) -> int:
    """How many pods hold that many workers, by what the job said about itself when it was submitted."""
    found = re.fullmatch(r"(\d+):(\d+)/(\d+)", annotation or "")
    if found is None:
        raise FeatureNotAvailable("this job is not elastic", hint="submit it with --elastic")
    least, most, per_node = map(int, found.groups())
    if not least <= workers <= most:
        raise InvalidArgument(f"this job may have {least} to {most} workers", workers=workers)
    if workers % per_node:
        raise InvalidArgument(
            f"every pod of this job has {per_node} workers",
            hint=f"for example {workers - workers % per_node or per_node}",
            workers=workers,
        )
    return workers // per_node


def _suspension(kind: JobKind, value: bool) -> Manifest:
    return {"spec": {"runPolicy": {"suspend": value}} if kind is JobKind.PYTORCHJOB else {"suspend": value}}


def _owner(job: Manifest) -> Manifest:
    return {
        "apiVersion": job["apiVersion"],
        "kind": job["kind"],
        "name": job["metadata"]["name"],
        "uid": job["metadata"]["uid"],
        "controller": False,
        "blockOwnerDeletion": True,
    }


def _still_runs(pod: Manifest) -> bool:
    return pod.get("status", {}).get("phase") in ("Pending", "Running", "Unknown")
