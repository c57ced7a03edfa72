"""The pods' command, run here: our own kubelet mounts the files and the secret and starts what the manifest says.

No container and no cluster: names of pods are replaced by loopback, mounted paths by folders. What is real is `torsh
run` with the manifest's arguments and variables, the secret, the probes, and SIGTERM.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.bed.ports import free_port
from tests.clusters.kubernetes.submissions import job
from torsh_distributed.clusters.kubernetes.job_kinds import JobObjects, job_objects, token_secret
from torsh_distributed.clusters.kubernetes.kubernetes_options import HEALTH_PORT, KubernetesOptions
from torsh_distributed.launch.spec import Entry

pytestmark = pytest.mark.ranks

SCRIPT = """
import os, signal, sys, time
from pathlib import Path

import torch
import torsh_distributed as td

folder = Path(sys.argv[1])
td.init()
total = torch.tensor([float(td.rank() + 1)])
td.all_reduce(total)
(folder / f"sum-{td.rank()}").write_text(f"{total.item()} of {td.world_size()}, argument {sys.argv[2]}")
if sys.argv[3] == "wait":
    told = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    signal.signal(signal.SIGUSR1, lambda number, frame: told.append(number))
    (folder / f"waits-{td.rank()}").touch()
    while signal.SIGTERM not in told:
        time.sleep(0.01)
    (folder / f"told-{td.rank()}").write_text(" ".join(map(str, told)))
    sys.exit(75)
"""


class Kubelet:
    """Starts the pods of a Job as processes of this machine."""

    def __init__(self, made: JobObjects, folder: Path) -> None:
        self.made, self.folder = made, folder
        config = next(one for one in made.beside if one["kind"] == "ConfigMap")
        self.data: dict[str, str] = config["data"]
        (folder / "files").mkdir()
        (folder / "secret").mkdir(mode=0o700)
        for name, text in self.data.items():
            (folder / "files" / name).write_text(text)
        for name, text in token_secret("train-1", "the secret of a test", None)["stringData"].items():
            path = folder / "secret" / name
            path.touch(mode=0o400)
            path.chmod(0o600)
            path.write_text(text)
            path.chmod(0o400)
        self.pods: list[subprocess.Popen[str]] = []
        self.master_port = free_port()
        self.health_ports: list[int] = []

    def start(self) -> None:
        (container,) = self.made.job["spec"]["template"]["spec"]["containers"]
        for index in range(self.made.job["spec"]["completions"]):
            self.health_ports.append(free_port())
            variables = {"JOB_COMPLETION_INDEX": str(index)}
            for one in container["env"]:
                variables[one["name"]] = one.get("value") or self._value(one["valueFrom"])
            command = [self._expanded(word, variables, index) for word in container["command"]]
            assert command[:2] == ["torsh", "run"]
            self.pods.append(
                subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "torsh_distributed.run",
                        "--master-port",
                        str(self.master_port),
                        *command[2:],
                    ],
                    env={**os.environ, **variables},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    cwd=self.folder,
                )
            )

    def _value(self, source: dict[str, Any]) -> str:
        if "fieldRef" in source:
            return "127.0.0.1"
        return self.data[source["configMapKeyRef"]["key"]]

    def _expanded(self, word: str, variables: dict[str, str], index: int) -> str:
        """As Kubernetes does it: $(NAME) is a variable, $$ a dollar. Then this machine in place of a cluster."""
        word = re.sub(
            r"\$\$|\$\((\w+)\)",
            lambda found: "$" if found[0] == "$$" else variables.get(found[1], found[0]),
            word,
        )
        word = word.replace("train-1-0.train-1", "127.0.0.1").replace("/torsh/job", str(self.folder / "files"))
        return word.replace("/torsh/secret", str(self.folder / "secret")).replace(
            f"127.0.0.1:{HEALTH_PORT}", f"127.0.0.1:{self.health_ports[index]}"
        )

    def probe(self, index: int, path: str) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.health_ports[index]}{path}", timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except OSError:
            return 0

    def finish(self) -> list[int]:
        said = [pod.communicate(timeout=60)[0] for pod in self.pods]
        codes = [pod.returncode for pod in self.pods]
        assert all("Traceback" not in text for text in said), said
        return codes

    def close(self) -> None:
        for pod in self.pods:
            if pod.poll() is None:
                pod.kill()
                pod.communicate(timeout=30)


def wait_for(is_so: Any) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_two_pods_meet_train_are_probed_and_save_when_they_are_taken_away(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    submission = job(tmp_path, workers_per_node=1, entry=Entry(target="train.py", args=(str(tmp_path), "$(X)", "wait")))
    kubelet = Kubelet(job_objects(submission, KubernetesOptions.of(submission)), tmp_path)
    try:
        kubelet.start()
        wait_for(lambda: all((tmp_path / f"waits-{rank}").exists() for rank in range(2)))
        for index in range(2):
            assert kubelet.probe(index, "/healthz") == kubelet.probe(index, "/readyz") == 200
        # Eviction of the second pod: its preStop hook, then SIGTERM.
        assert job_hook(kubelet.made) == "kill -USR1 1"
        kubelet.pods[1].send_signal(signal.SIGUSR1)
        wait_for(lambda: kubelet.probe(1, "/healthz") == 200)
        kubelet.pods[1].send_signal(signal.SIGTERM)
        codes = kubelet.finish()
    finally:
        kubelet.close()
    assert 0 not in codes
    assert [(tmp_path / f"sum-{rank}").read_text() for rank in range(2)] == ["3.0 of 2, argument $(X)"] * 2
    assert (tmp_path / "told-1").read_text() == f"{signal.SIGUSR1:d} {signal.SIGTERM:d}"
    assert (tmp_path / "told-0").read_text() == f"{signal.SIGTERM:d}", "the other node is told too"


def job_hook(made: JobObjects) -> str:
    (container,) = made.job["spec"]["template"]["spec"]["containers"]
    return str(container["lifecycle"]["preStop"]["exec"]["command"][-1])
