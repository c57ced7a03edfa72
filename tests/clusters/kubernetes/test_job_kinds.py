"""The objects of a job: taken by the API of three versions, complete, and without the secret."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clusters.kubernetes.schemas import VERSIONS, problem
from tests.clusters.kubernetes.submissions import full, job
from torsh_distributed.clusters.kubernetes.job_kinds import JobObjects, job_objects, token_secret
from torsh_distributed.clusters.kubernetes.kubernetes_options import JobKind, KubernetesOptions
from torsh_distributed.clusters.submission import Submission
from torsh_distributed.errors import InvalidArgument, IoError
from torsh_distributed.launch.spec import Entry, EntryKind

pytestmark = pytest.mark.needs_library("kubernetes_validate")


def objects(submission: Submission) -> JobObjects:
    return job_objects(submission, KubernetesOptions.of(submission))


def pod_spec(made: JobObjects) -> dict[str, Any]:
    return dict(made.job["spec"]["template"]["spec"])


@pytest.mark.parametrize("kind", list(JobKind))
@pytest.mark.parametrize("version", VERSIONS)
def test_the_api_of_three_versions_takes_every_object(tmp_path: Path, kind: JobKind, version: str) -> None:
    for submission in (job(tmp_path, options={"kind": kind}), full(tmp_path, kind=kind)):
        made = objects(submission)
        for manifest in (*made.all, token_secret("train-1", "secret", "team")):
            assert problem(manifest, version) is None, manifest


def test_the_check_itself_finds_a_wrong_field(tmp_path: Path) -> None:
    for kind in JobKind:
        made = objects(job(tmp_path, options={"kind": kind}))
        owner = made.before[0] if kind is JobKind.TRAINJOB else made.job
        text = json.dumps(owner).replace('"terminationGracePeriodSeconds"', '"terminationGraceSeconds"')
        assert "terminationGraceSeconds" in str(problem(json.loads(text), VERSIONS[0]))
        made.job["spec"]["colour"] = "red"
        assert "colour" in str(problem(made.job, VERSIONS[0]))


def test_an_indexed_job_has_a_pod_per_node_and_names_for_them(tmp_path: Path) -> None:
    made = objects(full(tmp_path))
    spec, pod = made.job["spec"], pod_spec(made)
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 4)
    assert spec["suspend"] is True, "nothing starts before the rest is there"
    assert spec["activeDeadlineSeconds"] == 3600
    assert spec["backoffLimit"] == 8
    config, service = made.beside
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    (container,) = pod["containers"]
    command = container["command"]
    assert command[:2] == ["torsh", "run"], "process 1, so that signals reach it"
    assert command[command.index("--node-rank") + 1] == "$(JOB_COMPLETION_INDEX)"
    assert command[command.index("--master-addr") + 1] == "train-1-0.train-1"
    assert command[-4:] == ["/torsh/job/train.py", "--lr", "0.1", "$$(HOME)"]
    assert config["data"] == {"nodes": "4", "plan.toml": "dp = 8\n", "train.py": "print('trained')\n"}
    assert container["resources"] == {
        "requests": {"cpu": "6", "memory": "16Gi", "nvidia.com/gpu": "2"},
        "limits": {"memory": "16Gi", "nvidia.com/gpu": "2"},
    }


def test_a_pod_has_shared_memory_probes_and_time_to_save(tmp_path: Path) -> None:
    pod = pod_spec(objects(full(tmp_path, grace_s="90")))
    (container,) = pod["containers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "4Gi"}
    assert mounts["shm"]["mountPath"] == "/dev/shm"
    assert mounts["data"]["mountPath"] == "/data"
    assert set(volumes) == set(mounts)
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "health"}
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert pod["terminationGracePeriodSeconds"] == 90
    assert container["command"][container["command"].index("--signal-timeout") + 1] == "85"
    assert "USR1" in " ".join(container["lifecycle"]["preStop"]["exec"]["command"])
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True


def test_the_secret_is_in_no_object_but_its_own(tmp_path: Path) -> None:
    made = objects(job(tmp_path))
    volumes = {volume["name"]: volume for volume in pod_spec(made)["volumes"]}
    assert volumes["secret"]["secret"] == {"secretName": "train-1-token", "defaultMode": 0o400}
    command = " ".join(pod_spec(made)["containers"][0]["command"])
    assert "--token-file /torsh/secret/job.token" in command
    assert all("token" not in variable["name"].lower() for variable in pod_spec(made)["containers"][0]["env"])
    assert not any(manifest["kind"] == "Secret" for manifest in made.all)


def test_a_job_that_saved_and_left_has_not_failed(tmp_path: Path) -> None:
    rules = objects(job(tmp_path)).job["spec"]["podFailurePolicy"]["rules"]
    assert {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [75]}} in rules
    assert any(rule.get("onPodConditions", [{}])[0].get("type") == "DisruptionTarget" for rule in rules)


def test_a_job_on_one_node_needs_no_secret_and_no_service(tmp_path: Path) -> None:
    made = objects(job(tmp_path, nodes=1))
    assert [manifest["kind"] for manifest in made.beside] == ["ConfigMap"]
    assert "--token-file" not in pod_spec(made)["containers"][0]["command"]


def test_the_operators_give_pods_their_place(tmp_path: Path) -> None:
    job_set = objects(job(tmp_path, options={"kind": "jobset"})).job
    template = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    assert "train-1-node-0-0.train-1" in template["spec"]["containers"][0]["command"]
    train = objects(job(tmp_path, options={"kind": "trainjob"}))
    (runtime,) = train.before
    inner = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    assert "--node-rank" not in inner["spec"]["containers"][0]["command"], "PET_NODE_RANK has it"
    assert train.job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    replicas = objects(job(tmp_path, nodes=3, options={"kind": "pytorchjob"})).job["spec"]["pytorchReplicaSpecs"]
    assert {name: replica["replicas"] for name, replica in replicas.items()} == {"Master": 1, "Worker": 2}
    (container,) = replicas["Worker"]["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    assert container["command"][container["command"].index("--node-rank") + 1] == "$(RANK)"


def test_a_script_of_the_image_is_left_there(tmp_path: Path) -> None:
    made = objects(job(tmp_path, entry=Entry(target="/opt/train.py"), options={"code": "image"}))
    assert pod_spec(made)["containers"][0]["command"][-1] == "/opt/train.py"
    made = objects(job(tmp_path, entry=Entry(kind=EntryKind.MODULE, target="package.train")))
    assert pod_spec(made)["containers"][0]["command"][-2:] == ["-m", "package.train"]
    assert made.beside[0]["data"] == {"nodes": "2"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": {"image": ""}}, "needs an image"),
        ({"options": {"imge": "x"}}, "did you mean 'image'"),
        ({"options": {"kind": "cronjob"}}, "kind must be one of"),
        ({"options": {"code": "git"}}, "code must be"),
        ({"options": {"volume": "claim"}}, "CLAIM:/path"),
        ({"options": {"grace_s": "3"}}, "at least 10"),
        ({"options": {"ttl_s": "soon"}}, "whole number"),
        ({"options": {"shm": "much"}}, "8G, 512M"),
        ({"options": {"node_selector": "gpu"}}, "key=value"),
        ({"options": {"pull_policy": "Maybe"}}, "pull_policy"),
        ({"name": "Train_1"}, "--name train-1|--name train"),
        ({"name": "a" * 60}, "at most"),
        ({"memory_per_worker": "8 apples"}, "8G, 512M"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_asked(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        objects(job(tmp_path, **changes))


def test_files_that_cannot_travel_are_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("#" * (1 << 20))
    with pytest.raises(InvalidArgument, match="megabyte"):
        objects(job(tmp_path))
    (tmp_path / "train.py").unlink()
    (tmp_path / "train.py").mkdir()
    with pytest.raises(IoError, match="code=image"):
        objects(job(tmp_path))
