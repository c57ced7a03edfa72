"""Two-node jobs on odd hosts: names that mean loopback, several networks, containers, other clocks, IPv6 alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.bed.world import World
from tests.lab.network import Host, Lab
from tests.launch.jobs import launch, write_script
from torsh_distributed.errors import CommunicationError

pytestmark = [pytest.mark.needs_netns, pytest.mark.ranks]

TOKEN = "shared by both"
JOIN_AND_REDUCE = """
import torch
import torch.distributed as dist
import torsh_distributed as td

td.init(timeout_s=30)
total = td.all_reduce(torch.ones(1000)).sum().item()
beside = torch.ones(10)
dist.all_reduce(beside, group=dist.new_group(backend="gloo"))
nodes = len(td.comm.groups.process_group.roster().node_order)
td.destroy_process_group()
leave(f"rank-{rank}", f"{os.environ['GLOO_SOCKET_IFNAME']} {total:g} {beside.sum().item():g} {nodes}")
"""
CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
OTHER_CLOCKS = ("--time", "--monotonic", "500000", "--boottime", "500000")


def run_on(
    host: Host, node_rank: int, master: str, script: str, *, container: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """`torsh run` as one node of two, in a container of its own if asked for."""
    options = ["--nnodes", "2", "--node-rank", str(node_rank), "--master-addr", master, "--join-timeout", "30"]
    options += ["--start-method", "spawn"]  # a worker a host: there is nobody to share an import with
    command = [sys.executable, "-m", "torsh_distributed.run", *options, script]
    return host.popen(
        [*container, *command],
        env={"TORSH_JOB_TOKEN": TOKEN},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def end_well(*nodes: subprocess.Popen[str]) -> None:
    outputs = [node.communicate(timeout=90)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0] * len(nodes), "\n".join(outputs)


def test_a_job_of_containers_on_the_second_network_of_hosts_with_odd_names_and_clocks(lab: Lab, tmp_path: Path) -> None:
    """Left alone, gloo would listen on 127.0.1.1; left to the names, on the first network, which is cut here."""
    a, b = lab.hosts(2)
    for host, address in ((a, "10.112.0.1"), (b, "10.112.0.2")):
        host.name_means("127.0.1.1")
        host.add_interface("eth1", address)
        host.link_down()
    script = write_script(tmp_path, JOIN_AND_REDUCE)
    first = run_on(a, 0, "10.112.0.1", script, container=CONTAINER)
    second = run_on(b, 1, "10.112.0.1", script, container=(*CONTAINER, *OTHER_CLOCKS))
    end_well(first, second)
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)] == ["eth1 2000 20 2"] * 2


LEAVE_ENVIRONMENT = 'leave(f"rank-{rank}", os.environ["MASTER_ADDR"] + " " + os.environ["GLOO_SOCKET_IFNAME"])'


def test_the_master_may_be_given_by_a_name_that_means_loopback_on_itself(
    world: World, lab: Lab, tmp_path: Path
) -> None:
    hosts = lab.hosts(2)
    for host in hosts:
        host.name_means("127.0.1.1")
    script = write_script(tmp_path, LEAVE_ENVIRONMENT)
    for outcome in launch(world, script, num_nodes=2, hosts=hosts, master_addr="node0", token=TOKEN):
        assert outcome.value == 0, outcome.output
    # Workers get the address: on node 0 the name would lead them to loopback, where no store listens.
    assert {(tmp_path / f"rank-{rank}").read_text() for rank in range(4)} == {f"{hosts[0].address} eth0"}


def test_a_master_whose_name_leads_nowhere_is_told_to_give_an_address(world: World, lab: Lab, tmp_path: Path) -> None:
    (host,) = lab.hosts(1)
    host.name_means("127.0.1.1")
    host.add_interface("eth1", "10.112.0.1")  # two networks, no default route: which one is meant?
    first, _ = launch(
        world,
        write_script(tmp_path, ""),
        num_nodes=2,
        hosts=[host, host],
        master_addr="node0",
        join_timeout_s=0.5,
        token=TOKEN,
    )
    assert isinstance(first.error, CommunicationError)
    assert "the name 'node0' means 127.0.1.1 on this node, which others cannot reach" in str(first.error)
    assert "give --master-addr the numeric address" in str(first.error)


@pytest.mark.parametrize("master", ["fd00:111::1", "node0"])
def test_a_job_spans_hosts_with_ipv6_alone(world: World, lab: Lab, tmp_path: Path, master: str) -> None:
    hosts = lab.hosts(2)
    for host in hosts:
        host.use_ipv6_only()
    script = write_script(tmp_path, LEAVE_ENVIRONMENT)
    for outcome in launch(world, script, num_nodes=2, hosts=hosts, master_addr=master, token=TOKEN):
        assert outcome.value == 0, outcome.output
    assert {(tmp_path / f"rank-{rank}").read_text() for rank in range(4)} == {f"{master} eth0"}
