"""Is an object what the API takes? The core kinds by the published schemas, strictly; the operators' kinds by ours.

`kubernetes-validate` has the schemas of Kubernetes itself. JobSet, TrainJob, TrainingRuntime and PyTorchJob are custom
resources: their own fields are listed here as their Go types have them, and the Job and pod templates inside them are
checked by the published schemas.
"""

from __future__ import annotations

import functools
from typing import Any

VERSIONS = ("1.35", "1.36", "1.37")

_TEXT, _WHOLE, _FLAG = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}


def _fields(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


_METADATA = {"type": "object"}
_JOB_TEMPLATE = _fields(("spec",), metadata=_METADATA, spec={"type": "object"})
_REPLICATED = _fields(("name", "template"), name=_TEXT, replicas=_WHOLE, template=_JOB_TEMPLATE)
_REPLICA = _fields(
    ("template",),
    replicas=_WHOLE,
    restartPolicy={"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
    template={"type": "object"},
)
_SPECS = {
    "JobSet": _fields(
        ("replicatedJobs",),
        suspend=_FLAG,
        network=_fields(enableDNSHostnames=_FLAG, subdomain=_TEXT, publishNotReadyAddresses=_FLAG),
        failurePolicy=_fields(maxRestarts=_WHOLE),
        ttlSecondsAfterFinished=_WHOLE,
        replicatedJobs={"type": "array", "items": _REPLICATED, "minItems": 1},
    ),
    "TrainJob": _fields(
        ("runtimeRef",),
        suspend=_FLAG,
        runtimeRef=_fields(("name",), name=_TEXT, apiGroup=_TEXT, kind=_TEXT),
        trainer=_fields(numNodes=_WHOLE),
    ),
    "TrainingRuntime": _fields(
        ("template",),
        mlPolicy=_fields(numNodes=_WHOLE, torch=_fields(numProcPerNode={})),
        template=_fields(("spec",), spec=_fields(replicatedJobs={"type": "array", "items": _REPLICATED})),
    ),
    "PyTorchJob": _fields(
        ("pytorchReplicaSpecs",),
        runPolicy=_fields(
            suspend=_FLAG,
            cleanPodPolicy={"enum": ["None", "Running", "All"]},
            backoffLimit=_WHOLE,
            activeDeadlineSeconds=_WHOLE,
            ttlSecondsAfterFinished=_WHOLE,
        ),
        pytorchReplicaSpecs=_fields(("Master",), Master=_REPLICA, Worker=_REPLICA),
    ),
}


def problem(manifest: dict[str, Any], version: str) -> str | None:
    """What is wrong with the object; None if the API takes it."""
    import jsonschema
    import kubernetes_validate

    try:
        if manifest.get("kind") in _SPECS:
            _check_custom(manifest, version)
        else:
            _check_core(manifest, version)
    except jsonschema.ValidationError as error:
        return f"{'.'.join(map(str, error.path))}: {error.message}"
    except kubernetes_validate.SchemaNotFoundError as error:
        return str(error.message)
    return None


def _check_core(manifest: dict[str, Any], version: str) -> None:
    import kubernetes_validate
    from kubernetes_validate import utils

    if not hasattr(utils.schema_contents, "cache_info"):
        utils.schema_contents = functools.cache(utils.schema_contents)  # it reads megabytes for every object
    kubernetes_validate.validate(manifest, version, strict=True)


def _check_custom(manifest: dict[str, Any], version: str) -> None:
    import jsonschema

    whole = _fields(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion=_TEXT,
        kind=_TEXT,
        metadata=_METADATA,
        spec=_SPECS[manifest["kind"]],
        status={"type": "object"},
    )
    jsonschema.Draft202012Validator(whole).validate(manifest)
    spec = manifest["spec"]
    name = {"name": manifest["metadata"]["name"]}
    nested = spec["template"]["spec"] if manifest["kind"] == "TrainingRuntime" else spec
    for replicated in nested.get("replicatedJobs", ()):
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": name, "spec": replicated["template"]["spec"]}
        _check_core(job, version)
    for replica in spec.get("pytorchReplicaSpecs", {}).values():
        template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": name, "template": replica["template"]}
        _check_core(template, version)
