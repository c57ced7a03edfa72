"""SSH as an engine: its command, hosts that are too few, a job that is scaled. More: test_same_losses, launch/ssh."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bed.ports import free_port
from tests.lab.network import Lab
from tests.lab.ssh_hosts import SshHosts
from torsh_distributed.clusters.ssh.ssh_engine import SshEngine
from torsh_distributed.clusters.submission import Submission
from torsh_distributed.errors import CommunicationError, InvalidArgument
from torsh_distributed.launch.spec import ElasticSpec, Entry

SCRIPT = Path(__file__).parents[1] / "grow_job.py"


def submission(**changes: object) -> Submission:
    values: dict[str, object] = {"entry": Entry(target="train.py", args=("--lr", "1")), "name": "job"}
    return Submission(**{**values, **changes})  # type: ignore[arg-type]


def test_the_job_gets_the_first_hosts_that_are_large_enough() -> None:
    engine = SshEngine({"hosts": "a:2,b:8,c", "port_range": "29500-29510", "heartbeat_timeout": "5"})
    shown = engine.render(
        submission(
            nodes=2,
            workers_per_node=4,
            env={"KEY": "hush-hush"},
            plan=Path("/plan.toml"),
            elastic=ElasticSpec(min_workers=2, max_workers=8),
        )
    )
    assert "run --ssh --hosts b:4,c:4 --port-range 29500-29510 --heartbeat-timeout 5 --carry KEY " in shown
    assert " --rdzv-id job --plan /plan.toml " in shown
    assert shown.endswith("--elastic --min-workers 2 --max-workers 8 --on-loss replace train.py --lr 1")
    assert "hush-hush" not in shown


def test_too_few_hosts_are_listed() -> None:
    with pytest.raises(CommunicationError, match=r"there are 1 of 2: a \(2 slots\), b"):
        SshEngine({"hosts": "a:2,b"}).render(submission(nodes=2, workers_per_node=4))


def test_what_ssh_cannot_give_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="needs hosts"):
        SshEngine({})
    for changes in ({"memory_per_worker": "1G"}, {"gpus_per_worker": 2}):
        with pytest.raises(InvalidArgument, match="would have no effect"):
            SshEngine({"hosts": "a"}).render(submission(**changes))


@pytest.mark.needs_command("ssh")
@pytest.mark.ranks
def test_a_host_that_cannot_be_entered_is_told_at_once(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(f"Host shut\n  HostName 127.0.0.1\n  Port {free_port()}\n")
    script = tmp_path / "train.py"
    script.write_text("")
    torsh = [sys.executable, "-m", "torsh_distributed.cli.entry_point", "submit", "--to", "ssh"]
    settings = ["--set", "hosts=nowhere.invalid,shut", "--set", f"config={config}", "--nodes", "2"]
    env = {**os.environ, "TORSH_STATE_DIR": str(tmp_path / "state")}
    done = subprocess.run([*torsh, *settings, str(script)], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert "nowhere.invalid: ssh: Could not resolve hostname nowhere.invalid" in " ".join(done.stderr.split())
    assert "shut: ssh: connect to host 127.0.0.1" in " ".join(done.stderr.split())
    assert "start sshd there" in done.stderr
    assert not list((tmp_path / "state").rglob("job.json"))


@pytest.mark.matrix
@pytest.mark.ranks
@pytest.mark.needs_netns
@pytest.mark.needs_command("/usr/sbin/sshd")
@pytest.mark.timeout(300)
def test_an_elastic_job_grows_when_it_is_told_to(lab: Lab, tmp_path: Path) -> None:
    """Two hosts with a worker each; the job ends when it has a third."""
    torsh = [sys.executable, "-m", "torsh_distributed.cli.entry_point"]
    env = {"TORSH_STATE_DIR": str(tmp_path / "state")}
    with SshHosts(lab.hosts(2), tmp_path) as ssh:
        here = lab.host(2)
        settings = ["--set", "hosts=node0,node1", "--set", f"config={ssh.config}", "--set", "heartbeat_timeout=60"]
        limits = ["--nodes", "2", "--elastic", "--min-workers", "1", "--max-workers", "3"]
        here.run(
            [*torsh, "submit", "--to", "ssh", *limits, *settings, "--name", "grow", str(SCRIPT), "3"],
            env=env,
            timeout_s=120,
        )
        log = tmp_path / "state" / "jobs" / "grow" / "output.log"
        deadline = time.monotonic() + 120
        while "two steps" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        said = here.run([*torsh, "scale", "grow", "9"], env=env, timeout_s=120, check=False)
        assert said.returncode != 0, "more than it may have"
        here.run([*torsh, "scale", "grow", "3"], env=env, timeout_s=120)
        done = here.run([*torsh, "logs", "-f", "grow"], env=env, timeout_s=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ends with 3 workers") == 3, done.stdout
