"""Hosts that a discovery script names: entered over a real sshd while a job runs, with slots of their own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.network import Lab
from tests.lab.ssh_hosts import SshHosts
from tests.migrate.horovod.elastic.discovery_jobs import check, records, set_slots, start, wait_for

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.needs_netns,
    pytest.mark.needs_command("/usr/sbin/sshd"),
    pytest.mark.needs_command("ssh"),
    pytest.mark.ranks,
]


@pytest.fixture
def ssh(lab: Lab, tmp_path: Path) -> Iterator[SshHosts]:
    with SshHosts(lab.hosts(2), tmp_path) as hosts:
        yield hosts


def test_hosts_are_entered_over_ssh_when_they_come_and_have_slots_of_their_own(
    ssh: SshHosts, lab: Lab, tmp_path: Path
) -> None:
    set_slots(tmp_path, "node0:1\n")
    line = ["-np", "1", "--max-np", "4", "--ssh-config", str(ssh.config), "--heartbeat-timeout", "60"]
    stages = "1,3=node0:1+node1:2,1=node1:1"
    job = start(tmp_path, *line, script_args=("--stages", stages), host=lab.host(2))
    assert job.wait(timeout=300) == 0, (tmp_path / "out").read_text()
    sizes = check(tmp_path)
    assert (sizes[0], max(sizes), sizes[-1]) == (1, 3, 1), sizes
    ends = [one for one in records(tmp_path) if one["event"] == "end"]
    assert [(one["rank"], one["size"], one["host"]) for one in ends] == [(0, 1, "node1")]
    assert "the host node1 is new: it becomes node 1" in (tmp_path / "out").read_text()


def test_a_lost_host_is_entered_again_after_its_cooldown(ssh: SshHosts, lab: Lab, tmp_path: Path) -> None:
    set_slots(tmp_path, "node0:1\nnode1:1\n")
    line = ["-np", "2", "--min-np", "1", "--blacklist-cooldown-range", "1", "4", "--ssh-config", str(ssh.config)]
    stages = "2,1=node0:1+node1:1,2=node0:1+node1:1"
    job = start(tmp_path, *line, script_args=("--stages", stages), host=lab.host(2))
    deadline_s = time.monotonic() + 120.0
    while not any(one["event"] == "step" for one in records(tmp_path)):
        assert time.monotonic() < deadline_s, (tmp_path / "out").read_text()
        time.sleep(0.01)
    lab.host(1).link_down()
    wait_for(tmp_path, "the host node1 is gone")
    lab.host(1).link_up()
    assert job.wait(timeout=300) == 0, (tmp_path / "out").read_text()
    sizes = check(tmp_path)
    assert (sizes[0], min(sizes), sizes[-1]) == (2, 1, 2), sizes
