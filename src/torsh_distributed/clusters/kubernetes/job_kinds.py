"""The objects of a job, for each kind of object that can run its pods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torsh_distributed.checkpoint.save_policy import EXIT_CODE
from torsh_distributed.clusters.kubernetes.kubernetes_options import MASTER_PORT, JobKind, KubernetesOptions
from torsh_distributed.clusters.kubernetes.pod_template import (
    JOB_LABEL,
    NODES_KEY,
    TOKEN_KEY,
    Manifest,
    MeetingFlags,
    has_peers,
    job_files,
    labels,
    pod_template,
    secret_name,
)
from torsh_distributed.clusters.submission import Submission

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
ELASTIC_ANNOTATION = "torsh-distributed/workers"
"""How many workers an elastic job may have, and on how many of them each pod has: `2:16/4`."""
_REPLICATED = "node"
_INDEX = "$(JOB_COMPLETION_INDEX)"


@dataclass(frozen=True, kw_only=True)
class JobObjects:
    """Everything of one job, in the order in which it is created."""

    before: tuple[Manifest, ...]
    """What must be there before the job is."""
    job: Manifest
    """The object that owns all others; it begins suspended, so no pod starts before the rest is there."""
    beside: tuple[Manifest, ...]
    """What the pods need; removed with the job. The Secret is not among them: only `token_secret` has the token."""
    starts_itself: bool
    """Whether someone else resumes the job: a queue."""

    @property
    def all(self) -> tuple[Manifest, ...]:
        """Every object."""
        return (*self.before, *self.beside, self.job)


def job_objects(submission: Submission, options: KubernetesOptions) -> JobObjects:
    """The objects of the job; asks nobody."""
    make = {
        JobKind.JOB: _indexed_job,
        JobKind.JOBSET: _job_set,
        JobKind.TRAINJOB: _train_job,
        JobKind.PYTORCHJOB: _pytorch_job,
    }[options.kind]
    before, job, beside = make(submission, options)
    if options.queue is not None:
        job["metadata"]["labels"][QUEUE_LABEL] = options.queue
    if submission.elastic is not None:
        spec = submission.elastic
        job["metadata"]["annotations"] = {
            ELASTIC_ANNOTATION: f"{spec.min_workers}:{spec.max_workers}/{submission.workers_per_node}"
        }
    return JobObjects(
        before=tuple(before), job=job, beside=(_files(submission, options), *beside), starts_itself=bool(options.queue)
    )


def token_secret(name: str, token: str, namespace: str | None) -> Manifest:
    """The Secret with the job's token."""
    return {**_object("v1", "Secret", secret_name(name), name, namespace), "stringData": {TOKEN_KEY: token}}


def _object(api: str, kind: str, name: str, job: str, namespace: str | None) -> Manifest:
    metadata: Manifest = {"name": name, "labels": labels(job)}
    if namespace is not None:
        metadata["namespace"] = namespace
    return {"apiVersion": api, "kind": kind, "metadata": metadata}


def _files(submission: Submission, options: KubernetesOptions) -> Manifest:
    name = submission.name
    return {
        **_object("v1", "ConfigMap", name, name, options.namespace),
        "data": {NODES_KEY: str(submission.nodes), **job_files(submission, options)},
    }


Made = tuple[list[Manifest], Manifest, list[Manifest]]


def _indexed_job(submission: Submission, options: KubernetesOptions) -> Made:
    name, is_alone = submission.name, not has_peers(submission)
    meeting = MeetingFlags(node_rank=_INDEX, master_addr=f"{name}-0.{name}")
    template = pod_template(submission, options, meeting, subdomain=None if is_alone else name)
    job = {
        **_object("batch/v1", "Job", name, name, options.namespace),
        "spec": {**_job_spec(submission, options), "suspend": True, "template": template},
    }
    service = {
        **_object("v1", "Service", name, name, options.namespace),
        "spec": {
            # No address of its own: names of pods, also of those that are not ready, since they meet to become so.
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {JOB_LABEL: name},
            "ports": [{"name": "launchers", "port": MASTER_PORT}],
        },
    }
    return [], job, [] if is_alone else [service]


def _job_spec(submission: Submission, options: KubernetesOptions) -> Manifest:
    """A Job with one pod per node; what is taken off its machine, or saved and left, does not count as failed."""
    spec: Manifest = {
        "completionMode": "Indexed",
        "completions": submission.nodes,
        "parallelism": submission.nodes,
        # If one node fails, the launchers of the others end too: a restart costs every pod one try.
        "backoffLimit": submission.max_restarts * submission.nodes,
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [EXIT_CODE]}},
            ]
        },
    }
    if submission.time_limit_s is not None:
        spec["activeDeadlineSeconds"] = round(submission.time_limit_s)
    if options.ttl_s is not None:
        spec["ttlSecondsAfterFinished"] = int(options.ttl_s)
    return spec


def _job_set(submission: Submission, options: KubernetesOptions) -> Made:
    name = submission.name
    meeting = MeetingFlags(node_rank=_INDEX, master_addr=f"{name}-{_REPLICATED}-0-0.{name}")
    template = pod_template(submission, options, meeting)
    job_spec = {**_job_spec(submission, options), "backoffLimit": 0, "template": template}
    job_spec.pop("ttlSecondsAfterFinished", None)
    spec: Manifest = {
        "suspend": True,
        "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": submission.max_restarts},
        "replicatedJobs": [{"name": _REPLICATED, "replicas": 1, "template": {"spec": job_spec}}],
    }
    if options.ttl_s is not None:
        spec["ttlSecondsAfterFinished"] = int(options.ttl_s)
    return [], {**_object("jobset.x-k8s.io/v1alpha2", "JobSet", name, name, options.namespace), "spec": spec}, []


def _train_job(submission: Submission, options: KubernetesOptions) -> Made:
    """A TrainJob says what a user may change; volumes and probes belong to a runtime, so the job brings its own."""
    name, api = submission.name, "trainer.kubeflow.org/v1alpha1"
    # The operator sets PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT, which `torsh run` reads.
    template = pod_template(submission, options, MeetingFlags(node_rank=None, master_addr=None))
    job_spec = {**_job_spec(submission, options), "template": template}
    for key in ("completions", "parallelism", "completionMode", "activeDeadlineSeconds", "ttlSecondsAfterFinished"):
        job_spec.pop(key, None)
    replicated = {
        "name": _REPLICATED,
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": job_spec,
        },
    }
    runtime = {
        **_object(api, "TrainingRuntime", name, name, options.namespace),
        "spec": {
            "mlPolicy": {"numNodes": submission.nodes, "torch": {}},
            "template": {"spec": {"replicatedJobs": [replicated]}},
        },
    }
    spec: Manifest = {
        "suspend": True,
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name},
        "trainer": {"numNodes": submission.nodes},
    }
    return [runtime], {**_object(api, "TrainJob", name, name, options.namespace), "spec": spec}, []


def _pytorch_job(submission: Submission, options: KubernetesOptions) -> Made:
    name = submission.name
    meeting = MeetingFlags(node_rank="$(RANK)", master_addr=f"{name}-master-0")
    template = pod_template(submission, options, meeting, container_name="pytorch")
    # The operator's word for it: a pod that ends with an error is started again, up to the limit.
    replicas: dict[str, Any] = {"Master": {"replicas": 1, "restartPolicy": "OnFailure", "template": template}}
    if submission.nodes > 1:
        replicas["Worker"] = {"replicas": submission.nodes - 1, "restartPolicy": "OnFailure", "template": template}
    policy: Manifest = {
        "suspend": True,
        "cleanPodPolicy": "None",
        "backoffLimit": submission.max_restarts * submission.nodes,
    }
    if submission.time_limit_s is not None:
        policy["activeDeadlineSeconds"] = round(submission.time_limit_s)
    if options.ttl_s is not None:
        policy["ttlSecondsAfterFinished"] = int(options.ttl_s)
    spec = {"runPolicy": policy, "pytorchReplicaSpecs": replicas}
    return [], {**_object("kubeflow.org/v1", "PyTorchJob", name, name, options.namespace), "spec": spec}, []
