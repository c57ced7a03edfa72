"""The engine against our own API server that validates as the real one: see `fake_api_server`, which is not one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.kubernetes.fake_api_server import FakeApiServer, documents
from tests.clusters.kubernetes.schemas import VERSIONS, problem
from tests.clusters.kubernetes.submissions import full, job
from torsh_distributed.clusters.base import JobState
from torsh_distributed.clusters.kubernetes.kubernetes_engine import KubernetesEngine, nodes_for
from torsh_distributed.clusters.registry import open_engine
from torsh_distributed.errors import (
    CommunicationError,
    ConfigurationError,
    FeatureNotAvailable,
    InvalidArgument,
)

pytestmark = [
    pytest.mark.needs_library("kubernetes_validate"),
    pytest.mark.needs_library("kubernetes"),
    pytest.mark.ranks,  # a server
]

JOB = "/apis/batch/v1/namespaces/team/jobs/train-1"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApiServer]:
    with FakeApiServer(tmp_path) as running:
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig()))
        yield running


@pytest.fixture
def engine(server: FakeApiServer) -> KubernetesEngine:
    return KubernetesEngine({})


def test_a_submitted_job_starts_when_everything_is_there(
    tmp_path: Path, server: FakeApiServer, engine: KubernetesEngine
) -> None:
    job_id = engine.submit(job(tmp_path))
    assert job_id == "team/job/train-1"
    kinds = sorted(one["kind"] for one in server.objects.values())
    assert kinds == ["ConfigMap", "Job", "Secret", "Service"]
    made = server.objects[JOB]
    assert made["spec"]["suspend"] is False
    creations = [path for method, path in server.requests if method == "POST"]
    assert "jobs" in creations[0], "the owner first"
    assert server.requests[-1][0] == "PATCH", "then what it owns, then it may start"
    for one in server.objects.values():
        if one["kind"] != "Job":
            assert one["metadata"]["ownerReferences"][0]["uid"] == made["metadata"]["uid"]
    (secret,) = server.of_kind("Secret")
    assert len(secret["stringData"]["job.token"]) == 64
    assert secret["stringData"]["job.token"] not in str(made)


def test_status_says_what_the_cluster_says(tmp_path: Path, server: FakeApiServer, engine: KubernetesEngine) -> None:
    job_id = engine.submit(job(tmp_path))
    assert engine.status(job_id).state is JobState.QUEUED
    paths = server.pods_of(server.objects[JOB], phase="Pending")
    no_room = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes: no gpu"}
    server.update(paths[1], status={"conditions": [no_room]})
    assert "0/3 nodes: no gpu" in engine.status(job_id).detail
    waiting = {"state": {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}}
    server.update(paths[0], status={"containerStatuses": [waiting]})
    assert "ErrImagePull: no such image" in engine.status(job_id).detail
    server.update(paths[0], status={"phase": "Running"})
    assert engine.status(job_id).state is JobState.RUNNING
    for path, code, at in ((paths[0], 1, "10:00:02Z"), (paths[1], 137, "10:00:01Z")):
        ended = {"state": {"terminated": {"exitCode": code, "finishedAt": at}}}
        server.update(path, status={"phase": "Failed", "containerStatuses": [ended]})
    failed = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "too often"}
    server.update(JOB, status={"conditions": [failed]})
    status = engine.status(job_id)
    assert (status.state, status.exit_code) == (JobState.FAILED, 137), "of the pod that failed first"
    server.update(JOB, status={"conditions": [{"type": "Complete", "status": "True"}]})
    assert (engine.status(job_id).state, engine.status(job_id).exit_code) == (JobState.SUCCEEDED, 0)
    assert engine.status("team/job/other").state is JobState.LOST


def test_logs_are_followed_until_the_last_pod_has_spoken(
    tmp_path: Path, server: FakeApiServer, engine: KubernetesEngine
) -> None:
    job_id = engine.submit(job(tmp_path))
    first, second = server.pods_of(server.objects[JOB])
    server.logs = {first: "node 0\n", second: "node 1\n"}
    assert list(engine.logs(job_id)) == ["node 0", "node 1"]

    def play() -> None:
        server.logs[first] += "the end\n"
        for path in (first, second):
            server.update(path, status={"phase": "Succeeded"})
        server.update(JOB, status={"conditions": [{"type": "Complete", "status": "True"}]})

    lines = engine.logs(job_id, follow=True)
    heard = {next(lines), next(lines)}
    threading.Timer(0.05, play).start()
    heard |= set(lines)
    assert heard == {"node 0", "node 1", "the end"}


def test_cancel_returns_when_nothing_runs(tmp_path: Path, server: FakeApiServer, engine: KubernetesEngine) -> None:
    job_id = engine.submit(job(tmp_path))
    server.pods_of(server.objects[JOB])

    def end_pods() -> None:
        server.wait_until(lambda: server.objects[JOB]["metadata"].get("deletionTimestamp"))
        server.remove(JOB)

    kubelet = threading.Thread(target=end_pods)
    kubelet.start()
    engine.cancel(job_id)
    kubelet.join()
    assert server.objects == {}, "the job has taken everything with it"
    assert engine.status(job_id).state is JobState.LOST
    engine.cancel(job_id)


def test_an_elastic_job_saves_and_comes_back_in_another_size(
    tmp_path: Path, server: FakeApiServer, engine: KubernetesEngine
) -> None:
    job_id = engine.submit(full(tmp_path))
    pods = server.pods_of(server.objects[JOB])

    def end_pods() -> None:
        server.wait_until(lambda: server.objects[JOB]["spec"]["suspend"])
        for path in pods:
            server.put(path, None)

    controller = threading.Thread(target=end_pods)
    controller.start()
    engine.scale(job_id, 6)
    controller.join()
    spec = server.objects[JOB]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["suspend"]) == (3, 3, False)
    (config,) = server.of_kind("ConfigMap")
    assert config["data"]["nodes"] == "3", "pods read it when they start"
    assert config["data"]["train.py"], "and still find the script"
    with pytest.raises(InvalidArgument, match="2 to 16 workers"):
        engine.scale(job_id, 18)
    with pytest.raises(InvalidArgument, match="every pod of this job has 2"):
        engine.scale(job_id, 3)
    with pytest.raises(FeatureNotAvailable, match="fixed when it is created"):
        engine.scale("team/jobset/train-1", 4)
    with pytest.raises(FeatureNotAvailable, match="not elastic"):
        nodes_for(4, None)


@pytest.mark.parametrize("kind", ["jobset", "trainjob", "pytorchjob"])
def test_the_operators_kinds_are_submitted_too(
    tmp_path: Path, server: FakeApiServer, engine: KubernetesEngine, kind: str
) -> None:
    assert engine.submit(full(tmp_path, kind=kind)) == f"team/{kind}/train-1"
    (made,) = [one for one in server.objects.values() if one["kind"].lower() == kind]
    spec = made["spec"]
    assert spec.get("suspend", spec.get("runPolicy", {}).get("suspend")) is False
    for one in server.objects.values():
        if one is not made:
            assert one["metadata"]["ownerReferences"][0]["uid"] == made["metadata"]["uid"], one["kind"]


def test_a_queue_decides_when_its_jobs_start(tmp_path: Path, server: FakeApiServer, engine: KubernetesEngine) -> None:
    job_id = engine.submit(job(tmp_path, options={"queue": "research"}))
    made = server.objects[JOB]
    assert made["spec"]["suspend"] is True
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert "not admitted" in engine.status(job_id).detail


@pytest.mark.parametrize("part", ["services/train-1", "secrets/train-1-token", "configmaps/train-1"])
def test_a_job_that_cannot_be_whole_is_not_there(
    tmp_path: Path, server: FakeApiServer, engine: KubernetesEngine, part: str
) -> None:
    server.refusals[f"/api/v1/namespaces/team/{part}"] = 403
    with pytest.raises(ConfigurationError, match="this account may not create"):
        engine.submit(job(tmp_path))
    assert server.objects == {}


def test_what_the_server_refuses_is_said_in_its_words(tmp_path: Path, server: FakeApiServer) -> None:
    engine = KubernetesEngine({})
    engine.submit(job(tmp_path))
    with pytest.raises(InvalidArgument, match="exists already: choose another --name"):
        engine.submit(job(tmp_path))
    assert len(server.of_kind("Job")) == 1, "the other one is left alone"
    server.refusals[JOB.replace("train-1", "wrong")] = 422
    with pytest.raises(InvalidArgument, match="refuses to create Job wrong: it was told to fail"):
        engine.submit(job(tmp_path, name="wrong"))
    assert len(server.of_kind("Job")) == 1
    server.kubeconfig(token="another")
    with pytest.raises(ConfigurationError, match="does not know who asks"):
        KubernetesEngine({}).status("team/job/train-1")
    server.kubeconfig()
    server.missing = ("jobset.x-k8s.io",)
    with pytest.raises(FeatureNotAvailable, match="install JobSet"):
        KubernetesEngine({}).submit(job(tmp_path, name="set", options={"kind": "jobset"}))
    with pytest.raises(InvalidArgument, match="NAMESPACE/KIND/NAME"):
        engine.status("train-1")


def test_a_server_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = FakeApiServer(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(gone.kubeconfig()))
    gone.server_close()
    with pytest.raises(CommunicationError, match=r"cannot be reached to create Job train-1.*"):
        KubernetesEngine({}).submit(job(tmp_path))


def test_a_server_with_another_certificate_is_not_trusted(
    tmp_path: Path, server: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    with FakeApiServer(tmp_path / "other"):
        (tmp_path / "server.pem").write_text((tmp_path / "other" / "server.pem").read_text())
    with pytest.raises(CommunicationError, match=r"not trusted: .*certificate"):
        KubernetesEngine({}).status("team/job/train-1")
    assert server.requests == [], "no token was sent"


def test_rendering_asks_nobody_and_shows_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    text = open_engine("k8s").render(job(tmp_path))
    kinds = [manifest["kind"] for manifest in documents(text)]
    assert kinds == ["ConfigMap", "Service", "Job"]
    assert all(problem(manifest, VERSIONS[-1]) is None for manifest in documents(text))
    assert "openssl rand -hex 32 | kubectl create secret generic train-1-token" in text
