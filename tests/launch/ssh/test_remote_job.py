"""Jobs over a real sshd: two hosts of the lab, and a third from which they are started."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.network import Host, Lab
from tests.lab.ssh_hosts import SshHosts
from tests.launch.jobs import still_running, wait_for_text

pytestmark = [pytest.mark.needs_command("/usr/sbin/sshd"), pytest.mark.needs_command("ssh"), pytest.mark.ranks]

TELL = """
import os, pathlib, socket
here = pathlib.Path(__file__).parent
secret = pathlib.Path(os.environ["TORSH_SECRET_FILE"]).read_text()
seen = []
for process in pathlib.Path("/proc").glob("[0-9]*"):
    for name in ("cmdline", "environ"):
        try:
            seen.append((process / name).read_bytes())
        except OSError:
            continue
assert len(secret) >= 32 and not any(secret.encode() in text for text in seen)
facts = [socket.gethostname(), os.getcwd(), os.environ["WORLD_SIZE"], os.environ["TORSH_CARRIED"], os.environ["MINE"]]
(here / f"rank-{os.environ['RANK']}").write_text(" ".join(facts))
"""
STAY = """
import os, pathlib, time
(pathlib.Path(__file__).parent / f"rank-{os.environ['RANK']}").write_text(str(os.getpid()))
while True:  # signal.pause() sleeps through a signal that comes just before it
    time.sleep(0.05)
"""


PATIENT = ("--heartbeat-timeout", "60")
"""For jobs that lose no host: on a busy machine launchers may not run for seconds."""


@pytest.fixture
def ssh(lab: Lab, tmp_path: Path) -> Iterator[SshHosts]:
    with SshHosts(lab.hosts(2), tmp_path) as hosts:
        yield hosts


def command(ssh: SshHosts, script: Path, *options: str, hosts: str = "node0:2,node1:2") -> list[str]:
    torsh = [sys.executable, "-m", "torsh_distributed.cli.entry_point", "run"]
    # The scripts do without torch: nothing has to import it for them.
    ours = ["--start-method", "spawn", "--ssh", "--hosts", hosts, "--ssh-config", str(ssh.config)]
    return [*torsh, *ours, *options, str(script)]


def start(here: Host, words: list[str], folder: Path, **env: str) -> subprocess.Popen[str]:
    with (folder / "out").open("w") as out:
        return here.popen(words, env=env, cwd=folder, stdout=out, stderr=out, stdin=subprocess.DEVNULL)


def wait_for(path: Path, text: str, timeout_s: float = 60.0) -> float:
    """Seconds until the file has the text."""
    start_s = time.monotonic()
    while text not in path.read_text():
        assert time.monotonic() < start_s + timeout_s, path.read_text()
        time.sleep(0.005)
    return time.monotonic() - start_s


def test_one_launcher_per_host_with_directory_and_variables_and_no_secret_in_sight(
    ssh: SshHosts, lab: Lab, tmp_path: Path
) -> None:
    script = tmp_path / "tell.py"
    script.write_text(TELL)
    words = command(ssh, script, *PATIENT, "--carry", "MINE", "--port-range", "29600-29650")
    job = start(lab.host(2), words, tmp_path, TORSH_CARRIED="1", MINE="2")
    assert job.wait(timeout=60) == 0, (tmp_path / "out").read_text()
    told = [(tmp_path / f"rank-{rank}").read_text() for rank in range(4)]
    assert told == [f"{host} {tmp_path} 4 1 2" for host in ("node0", "node0", "node1", "node1")]


def test_a_dead_host_is_named_and_all_else_ends(ssh: SshHosts, lab: Lab, tmp_path: Path) -> None:
    script = tmp_path / "stay.py"
    script.write_text(STAY)
    job = start(lab.host(2), command(ssh, script), tmp_path)
    for rank in range(4):
        wait_for_text(tmp_path / f"rank-{rank}")
    lab.host(1).link_down()
    # Two seconds where nothing else runs: one of silence, and what it takes to say so.
    assert wait_for(tmp_path / "out", "node 1 (node1)") < 30.0
    assert job.wait(timeout=90) == 1
    assert "its launcher is gone: no sign of life for" in (tmp_path / "out").read_text()
    assert still_running(script, timeout_s=30.0) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_whoever_ends_the_job_here_ends_it_on_every_host(
    ssh: SshHosts, lab: Lab, tmp_path: Path, number: signal.Signals
) -> None:
    script = tmp_path / "stay.py"
    script.write_text(STAY)
    job = start(lab.host(2), command(ssh, script, *PATIENT), tmp_path)
    for rank in range(4):
        wait_for_text(tmp_path / f"rank-{rank}")
    os.kill(job.pid, number)
    assert job.wait(timeout=90) == (130 if number == signal.SIGINT else -signal.SIGKILL), (tmp_path / "out").read_text()
    assert still_running(script, timeout_s=30.0) == []


def test_a_host_whose_key_is_not_known_is_not_entered(ssh: SshHosts, lab: Lab, tmp_path: Path) -> None:
    known = ssh.known_hosts.read_text().splitlines()
    ssh.known_hosts.write_text(known[0] + "\n")
    # What a careless configuration says does not count.
    ssh.config.write_text("StrictHostKeyChecking no\n" + ssh.config.read_text())
    script = tmp_path / "stay.py"
    script.write_text(STAY)
    job = start(lab.host(2), command(ssh, script), tmp_path)
    assert job.wait(timeout=90) == 1
    said = (tmp_path / "out").read_text()
    assert re.search(r"the host node1 is lost: .*Host key verification failed", said)
    assert "connect once by hand and check the key: ssh node1" in said
    assert still_running(script, timeout_s=30.0) == []
    assert not (tmp_path / "rank-2").exists()
