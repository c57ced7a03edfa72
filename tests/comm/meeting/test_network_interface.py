"""Which interface a job uses, on hosts of the lab that are set up as real ones are."""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torsh_distributed as td
from tests.bed.world import World
from tests.lab.network import Lab
from torsh_distributed.comm.meeting.network_interface import (
    LEG_VARIABLE,
    address_for_peers,
    address_towards,
    chosen_leg,
    interface_between_nodes,
    interface_of,
    interface_variables,
    job_interface,
    outward_address,
    tell_backends,
)
from torsh_distributed.comm.trust.job_tls import CERTIFICATE_VARIABLE, KEY_VARIABLE
from torsh_distributed.errors import ConfigurationError, FeatureNotAvailable

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def test_loopback_is_found_by_its_addresses() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.77") is None
    assert address_towards("no-such-host.invalid") is None
    assert job_interface("203.0.113.77", is_one_host=True) == "lo"
    # Several launchers that meet on loopback are on one machine.
    assert interface_between_nodes("127.0.0.1", num_nodes=2) == "lo"


def test_what_the_user_named_is_left_alone() -> None:
    environ = {"NCCL_SOCKET_IFNAME": "ib0"}
    assert tell_backends("eth1", environ) == ("GLOO_SOCKET_IFNAME",)
    assert environ == {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "eth1"}
    assert interface_variables(None) == {}
    assert interface_variables("eth1")["NCCL_SOCKET_IFNAME"] == "=eth1", "exactly this one, not eth10"
    assert interface_variables("lo") == {"GLOO_SOCKET_IFNAME": "lo"}, "nccl takes what it likes on one host"


def find_ways(master: str) -> dict[str, str | None]:
    return {
        "own name": socket.gethostbyname(socket.gethostname()),
        "to the master": address_towards(master),
        "for peers": address_for_peers(master),
        "interface": job_interface(master, is_one_host=False),
        "outward": outward_address(),
    }


def test_a_host_whose_name_means_loopback_is_found_by_its_way_to_the_master(world: World, lab: Lab) -> None:
    a, b = lab.hosts(2)
    for host in (a, b):
        host.name_means("127.0.1.1")
    b.add_interface("eth1", "10.112.0.2")
    # By name, the master is loopback on its own host alone.
    here, there = world.run(find_ways, "node0", backend=None, hosts=[a, b])
    assert here["own name"] == there["own name"] == "127.0.1.1"
    assert here["to the master"] in ("127.0.0.1", "127.0.1.1")
    assert here["for peers"] == here["outward"] == a.address, "its only address beyond loopback"
    assert there["to the master"] == there["for peers"] == b.address
    assert here["interface"] == there["interface"] == "eth0"
    assert there["outward"] is None, "two networks and no default route: nothing to choose by"


def reduce_everywhere(backend: str) -> dict[str, Any]:
    """A world on `backend` and a group of gloo beside it; where the process listens meanwhile."""
    td.init(backend=backend, timeout_s=20)
    told = {name: os.environ.get(name) for name in VARIABLES}
    total = td.all_reduce(torch.ones(1000)).sum().item()
    beside = torch.ones(10)
    dist.all_reduce(beside, group=dist.new_group(backend="gloo"))
    found = {"told": told, "total": total, "beside": beside.sum().item(), "listening": listening_addresses()}
    td.destroy_process_group()
    assert not any(name in os.environ for name in VARIABLES), "what init set is gone with the world"
    return found


def listening_addresses() -> set[str]:
    """The addresses on which this process accepts connections."""
    links = list(Path("/proc/self/fd").iterdir())
    mine = {str(link.readlink()) for link in links if link.is_symlink()}
    found = set()
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/self/net/{table}")
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                raw = bytes.fromhex(fields[1].partition(":")[0])
                # Each 32-bit word is in the byte order of the machine.
                words = b"".join(raw[start : start + 4][::-1] for start in range(0, len(raw), 4))
                found.add(str(ipaddress.ip_address(words)))
    return found


@pytest.mark.parametrize("backend", ["gloo", "torsh"])
def test_on_one_host_gloo_listens_on_loopback_alone(world: World, lab: Lab, backend: str) -> None:
    (host,) = lab.hosts(1)  # its name means an address of the network
    for found in world.run(reduce_everywhere, backend, backend=None, hosts=[host, host]):
        assert found["told"] == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": None}
        assert found["listening"] <= {"127.0.0.1", host.address}, "rank 0's store is where it was asked to be"
        assert "127.0.0.1" in found["listening"]
    # Rank 1 serves no store: all it listens on is gloo's.
    assert found["listening"] == {"127.0.0.1"}


@pytest.mark.parametrize("backend", ["gloo", "torsh"])
def test_hosts_whose_names_mean_loopback_reach_each_other(world: World, lab: Lab, backend: str) -> None:
    hosts = lab.hosts(2)
    for host in hosts:
        host.name_means("127.0.1.1")
    for host, found in zip(hosts, world.run(reduce_everywhere, backend, backend=None, hosts=hosts), strict=True):
        assert found["told"] == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}
        assert (found["total"], found["beside"]) == (2000.0, 20.0)
        assert found["listening"] == {host.address}


def reduce_as_plain_torch() -> float:
    """torch's own start, on our backend: nobody tells it an interface."""
    dist.init_process_group("torsh")
    total = torch.ones(10)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.sum().item()


def test_our_backend_finds_its_interface_in_a_plain_torch_program(world: World, lab: Lab) -> None:
    hosts = lab.hosts(2)
    for host in hosts:
        host.name_means("127.0.1.1")
    assert world.run(reduce_as_plain_torch, backend=None, hosts=hosts) == [20.0, 20.0]


def test_hosts_with_ipv6_alone_reach_each_other(world: World, lab: Lab) -> None:
    hosts = lab.hosts(2)
    for host in hosts:
        host.use_ipv6_only()
    for host, found in zip(hosts, world.run(reduce_everywhere, "torsh", backend=None, hosts=hosts), strict=True):
        assert found["told"]["GLOO_SOCKET_IFNAME"] == "eth0"
        assert found["total"] == 2000.0
        assert found["listening"] == {host.address}


def test_what_carries_data_is_an_option_or_a_variable_and_must_be_possible() -> None:
    assert chosen_leg(None, {}) == "gloo"
    assert chosen_leg(None, {LEG_VARIABLE: "mpi"}) == "mpi"
    assert chosen_leg("gloo", {LEG_VARIABLE: "mpi"}) == "gloo"
    with pytest.raises(ConfigurationError, match=f"{LEG_VARIABLE} must be gloo or mpi"):
        chosen_leg(None, {LEG_VARIABLE: "ib"})
    with pytest.raises(FeatureNotAvailable, match="MPI cannot encrypt"):
        chosen_leg("mpi", {CERTIFICATE_VARIABLE: "/c", KEY_VARIABLE: "/k"})
