"""What only Kubernetes knows about a job: `--set key=value` of `torsh submit --to k8s` and `torsh render k8s`."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from enum import StrEnum

from torsh_distributed.clusters.engine_options import require_known_options
from torsh_distributed.clusters.submission import Submission, parse_memory
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.known_variables import DEFAULT_MASTER_PORT

MASTER_PORT = DEFAULT_MASTER_PORT
"""Where the launchers of a job meet; every job has addresses of its own, so none needs another port."""
HEALTH_PORT = 8081
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
# Pods are called NAME-node-0-7; the longest name is a label of DNS, which has 63 characters.
_MAX_NAME = 63 - len("-node-0-99999")


class JobKind(StrEnum):
    """The object that runs the pods."""

    JOB = "job"
    """An Indexed Job and a headless Service: nothing but Kubernetes itself is needed."""

    JOBSET = "jobset"
    """A JobSet (sigs.k8s.io/jobset), which restarts all pods together."""

    TRAINJOB = "trainjob"
    """A TrainJob of Kubeflow Trainer v2, with a runtime of its own."""

    PYTORCHJOB = "pytorchjob"
    """A PyTorchJob of Kubeflow's training operator v1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesOptions:
    """The settings of `--set`, each checked; a default does what most clusters need."""

    image: str
    """The container image: Python, torch, torsh-distributed and, with `code=image`, the script."""

    kind: JobKind = JobKind.JOB
    """The object that runs the pods."""

    context: str | None = None
    """Which cluster and user of the kubeconfig; None takes the current one."""

    namespace: str | None = None
    """Where the job lives; None takes the kubeconfig's."""

    code: str = "configmap"
    """`configmap` carries the script in a ConfigMap (one file, up to a megabyte); `image` takes it from the image."""

    workdir: str = "/workspace"
    """Where the script is started, in the container."""

    shm: str | None = None
    """Size of /dev/shm, such as `8G`; None leaves it to the pod's memory."""

    volume: str | None = None
    """A claim for checkpoints and data, as `CLAIM:/path`."""

    gpu_resource: str = "nvidia.com/gpu"
    """What the cluster calls a GPU."""

    node_selector: str | None = None
    """Labels of the machines, as `key=value,key=value`."""

    queue: str | None = None
    """A queue of Kueue: the job stays suspended until Kueue admits it."""

    priority_class: str | None = None
    """The pods' priority class."""

    service_account: str | None = None
    """The pods' account; its token is never mounted."""

    user: str | None = None
    """Number of the user (and group) that the container runs as; None takes the image's."""

    pull_policy: str = "IfNotPresent"
    """When the image is pulled."""

    pull_secret: str | None = None
    """A Secret with the registry's password."""

    grace_s: str = "60"
    """Seconds from a pod's eviction to its end: the time to save."""

    ttl_s: str | None = None
    """Seconds after which a finished job is removed; None keeps it."""

    @classmethod
    def of(cls, submission: Submission) -> KubernetesOptions:
        """Read a submission's options; an unknown one is an error that proposes the nearest."""
        check_name(submission.name)
        given = dict(submission.options)
        require_known_options("k8s", given, known_settings())
        if not given.get("image"):
            raise InvalidArgument(
                "a job on Kubernetes needs an image",
                hint="--set image=REGISTRY/NAME:TAG; `torsh render docker` writes a Dockerfile for one",
            )
        kind = given.pop("kind", JobKind.JOB)
        if kind not in set(JobKind):
            raise InvalidArgument(f"kind must be one of {', '.join(JobKind)}", kind=kind)
        return cls(**given, kind=JobKind(kind))

    def __post_init__(self) -> None:
        if self.code not in ("configmap", "image"):
            raise InvalidArgument("code must be configmap or image", code=self.code)
        if self.pull_policy not in ("Always", "IfNotPresent", "Never"):
            raise InvalidArgument("pull_policy must be Always, IfNotPresent or Never", pull_policy=self.pull_policy)
        if self.volume is not None and not re.fullmatch(r"[^:]+:/.+", self.volume):
            raise InvalidArgument("volume must read CLAIM:/path", volume=self.volume)
        for key in ("grace_s", "ttl_s", "user"):
            text = getattr(self, key)
            if text is not None and not (text.isascii() and text.isdigit()):
                raise InvalidArgument(f"{key} must be a whole number", got=text)
        if int(self.grace_s) < 10:
            raise InvalidArgument("grace_s must be at least 10: the job saves in that time", grace_s=self.grace_s)
        for pair in (self.node_selector or "").split(",") if self.node_selector else ():
            if "=" not in pair:
                raise InvalidArgument("node_selector must read key=value,key=value", node_selector=self.node_selector)
        if self.shm is not None:
            quantity(self.shm)


def known_settings() -> dict[str, str]:
    """Every setting, with its default."""
    return {
        field.name: "required" if field.default is dataclasses.MISSING else str(field.default or "none")
        for field in dataclasses.fields(KubernetesOptions)
    }


def check_name(name: str) -> None:
    """Raise InvalidArgument unless the objects of a job can be called so."""
    if not _LABEL.fullmatch(name) or len(name) > _MAX_NAME:
        proposal = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-0123456789")[:_MAX_NAME].strip("-")
        raise InvalidArgument(
            "on Kubernetes a job's name has small letters, digits and '-', begins with a letter, and has at most "
            f"{_MAX_NAME} characters",
            hint=f"for example --name {proposal or 'train'}",
            name=name,
        )


def quantity(text: str, *, times: int = 1) -> str:
    """An amount of memory as Kubernetes writes it: `8G` is `8Gi`, as everywhere here."""
    size = parse_memory(text) * times
    for unit, factor in (("Ti", 2**40), ("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10)):
        if size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)
