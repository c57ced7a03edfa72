"""The pod of one node: `torsh run`, its shared memory, its probes, and the job's files and secret."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torsh_distributed.clusters.kubernetes.kubernetes_options import (
    HEALTH_PORT,
    MASTER_PORT,
    KubernetesOptions,
    quantity,
)
from torsh_distributed.clusters.submission import Submission
from torsh_distributed.errors import InvalidArgument, IoError
from torsh_distributed.launch.spec import EntryKind

Manifest = dict[str, Any]
"""An object of Kubernetes as JSON. Any: its parts are what the API's schemas say."""

JOB_LABEL = "torsh-distributed/job"
FILES_PATH, SECRET_PATH, TOKEN_KEY = "/torsh/job", "/torsh/secret", "job.token"
NODES_KEY = "nodes"
"""The number of nodes, in the job's ConfigMap: pods read it when they start, so an elastic job can change it."""
_MAX_FILES_BYTES = 1 << 20
_EXIT_MARGIN_S = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class MeetingFlags:
    """How a pod finds its place: what `torsh run` gets for these, with variables of the pod as `$(NAME)`.

    None leaves it to the variables that an operator sets (PET_NODE_RANK and so on).
    """

    node_rank: str | None
    master_addr: str | None


def labels(name: str) -> dict[str, str]:
    """On every object of the job."""
    return {"app.kubernetes.io/name": "torsh-distributed", JOB_LABEL: name}


def secret_name(name: str) -> str:
    """The Secret with the job's token."""
    return f"{name}-token"


def has_peers(submission: Submission) -> bool:
    """Whether pods meet other pods, now or after a change of size: then they need names and a secret."""
    return submission.nodes > 1 or submission.elastic is not None


def job_files(submission: Submission, options: KubernetesOptions) -> dict[str, str]:
    """Names and texts of the files that travel in the ConfigMap."""
    paths = {} if submission.plan is None else {f"plan{submission.plan.suffix}": submission.plan}
    if submission.entry.kind is EntryKind.SCRIPT and options.code == "configmap":
        script = Path(submission.entry.target)
        paths[script.name] = script if script.is_absolute() else submission.working_dir / script
    files = {}
    for name, path in paths.items():
        try:
            files[name] = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise IoError(
                f"{path} cannot be carried to the cluster: {error}",
                hint="with --set code=image the script is taken from the image",
                path=str(path),
            ) from error
    if sum(len(text.encode()) for text in files.values()) > _MAX_FILES_BYTES - 1024:
        raise InvalidArgument(
            "the script and the plan are larger than the megabyte that a ConfigMap holds",
            hint="build them into the image and use --set code=image",
            files=sorted(files),
        )
    return files


def run_command(submission: Submission, options: KubernetesOptions, meeting: MeetingFlags) -> list[str]:
    """What the pod runs, as process 1, so that signals reach the launcher."""
    command = ["torsh", "run", "--nproc-per-node", str(submission.workers_per_node), "--rdzv-id", submission.name]
    command += ["--max-restarts", str(submission.max_restarts), "--health", f"$(POD_IP):{HEALTH_PORT}"]
    command += ["--signal-timeout", str(int(options.grace_s) - _EXIT_MARGIN_S)]
    if has_peers(submission):
        command += ["--token-file", f"{SECRET_PATH}/{TOKEN_KEY}"]
        if meeting.node_rank is not None and meeting.master_addr is not None:
            command += ["--nnodes", "$(TORSH_NODES)", "--node-rank", meeting.node_rank]
            command += ["--master-addr", meeting.master_addr]
    if submission.plan is not None:
        command += ["--plan", f"{FILES_PATH}/plan{submission.plan.suffix}"]
    if submission.elastic is not None:
        spec = submission.elastic
        command += ["--elastic", "--min-workers", str(spec.min_workers), "--max-workers", str(spec.max_workers)]
        command += ["--on-loss", spec.on_loss]
    entry = submission.entry
    flags = {EntryKind.MODULE: ["-m"], EntryKind.COMMAND: ["--no-python"]}
    target = entry.target
    if entry.kind is EntryKind.SCRIPT and options.code == "configmap":
        target = f"{FILES_PATH}/{Path(target).name}"
    # Kubernetes reads $(NAME) in arguments; $$ is how it writes a dollar.
    own = [argument.replace("$(", "$$(") for argument in (target, *entry.args)]
    return [*command, *flags.get(entry.kind, []), *own]


def pod_template(
    submission: Submission,
    options: KubernetesOptions,
    meeting: MeetingFlags,
    *,
    container_name: str = "node",
    subdomain: str | None = None,
) -> Manifest:
    """The template of every pod of the job."""
    spec: Manifest = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(options.grace_s),
        "automountServiceAccountToken": False,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}, **_user(options)},
        "containers": [_container(submission, options, meeting, container_name)],
        "volumes": _volumes(submission, options),
    }
    if subdomain is not None:
        spec["subdomain"] = subdomain
    if options.service_account:
        spec["serviceAccountName"] = options.service_account
    if options.priority_class:
        spec["priorityClassName"] = options.priority_class
    if options.pull_secret:
        spec["imagePullSecrets"] = [{"name": options.pull_secret}]
    if options.node_selector:
        spec["nodeSelector"] = dict(pair.split("=", 1) for pair in options.node_selector.split(","))
    return {"metadata": {"labels": labels(submission.name)}, "spec": spec}


def _user(options: KubernetesOptions) -> Manifest:
    if options.user is None:
        return {}
    number = int(options.user)
    # The group owns the mounted secret, so that a user other than root can read it.
    return {"runAsUser": number, "runAsGroup": number, "fsGroup": number, "runAsNonRoot": number > 0}


def _container(submission: Submission, options: KubernetesOptions, meeting: MeetingFlags, name: str) -> Manifest:
    return {
        "name": name,
        "image": options.image,
        "imagePullPolicy": options.pull_policy,
        "workingDir": options.workdir,
        "command": run_command(submission, options, meeting),
        "env": _variables(submission),
        "ports": [
            # Kubeflow's training operator looks for a port of this name.
            {"name": "pytorchjob-port", "containerPort": MASTER_PORT},
            {"name": "health", "containerPort": HEALTH_PORT},
        ],
        "resources": _resources(submission, options),
        "volumeMounts": _mounts(submission, options),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "startupProbe": _probe("/healthz", period_s=5, failures=60),
        "livenessProbe": _probe("/healthz", period_s=10, failures=6),
        "readinessProbe": _probe("/readyz", period_s=5, failures=3),
        # The workers note it and save after their step; the SIGTERM that follows lets the launcher wait for them.
        "lifecycle": {"preStop": {"exec": {"command": ["/bin/sh", "-c", "kill -USR1 1"]}}},
    }


def _probe(path: str, *, period_s: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": "health"},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _variables(submission: Submission) -> list[Manifest]:
    variables: list[Manifest] = [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {
            "name": "TORSH_NODES",
            "valueFrom": {"configMapKeyRef": {"name": submission.name, "key": NODES_KEY}},
        },
        {"name": "PYTHONUNBUFFERED", "value": "1"},
    ]
    return variables + [
        {"name": name, "value": value.replace("$(", "$$(")} for name, value in sorted(submission.env.items())
    ]


def _resources(submission: Submission, options: KubernetesOptions) -> Manifest:
    workers = submission.workers_per_node
    wanted = {"cpu": str(submission.cpus_per_worker * workers)}
    limits = {}
    if submission.memory_per_worker is not None:
        # A limit equal to the request: a pod that asked for its memory is never evicted for it.
        wanted["memory"] = limits["memory"] = quantity(submission.memory_per_worker, times=workers)
    if submission.gpus_per_worker:
        limits[options.gpu_resource] = wanted[options.gpu_resource] = str(submission.gpus_per_worker * workers)
    return {"requests": wanted, "limits": limits} if limits else {"requests": wanted}


def _volumes(submission: Submission, options: KubernetesOptions) -> list[Manifest]:
    size = {} if options.shm is None else {"sizeLimit": quantity(options.shm)}
    volumes: list[Manifest] = [{"name": "shm", "emptyDir": {"medium": "Memory", **size}}]
    names = sorted(job_files(submission, options))
    if names:
        items = [{"key": name, "path": name} for name in names]
        volumes.append({"name": "files", "configMap": {"name": submission.name, "items": items}})
    if has_peers(submission):
        name = secret_name(submission.name)
        volumes.append({"name": "secret", "secret": {"secretName": name, "defaultMode": 0o400}})
    if options.volume:
        claim = options.volume.partition(":")[0]
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": claim}})
    return volumes


def _mounts(submission: Submission, options: KubernetesOptions) -> list[Manifest]:
    paths = {"shm": "/dev/shm", "files": FILES_PATH, "secret": SECRET_PATH}  # noqa: S108 - shared memory
    if options.volume:
        paths["data"] = options.volume.partition(":")[2]
    named = [volume["name"] for volume in _volumes(submission, options)]
    return [
        {"name": name, "mountPath": paths[name], **({"readOnly": True} if name in ("files", "secret") else {})}
        for name in named
    ]
