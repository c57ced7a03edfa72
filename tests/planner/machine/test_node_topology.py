"""Links as the system lists them: speeds that are marked as not measured wherever they enter a prediction."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from torsh_distributed.planner.machine import node_topology as module
from torsh_distributed.planner.machine.machine_profile import DeviceLink, Rate
from torsh_distributed.planner.machine.node_topology import NodeTopology, SystemLink, node_topology
from torsh_distributed.planner.machine.this_machine import _link_between_nodes, this_machine


def interface(folder: Path, name: str, *, speed: str, state: str = "up", is_device: bool = True) -> None:
    (folder / name / ("device" if is_device else "")).mkdir(parents=True)
    (folder / name / "speed").write_text(f"{speed}\n")
    (folder / name / "operstate").write_text(f"{state}\n")


def port(folder: Path, name: str, *, rate: str, state: str = "4: ACTIVE") -> None:
    path = folder / name / "ports" / "1"
    path.mkdir(parents=True)
    (path / "rate").write_text(f"{rate}\n")
    (path / "state").write_text(f"{state}\n")


def test_interfaces_that_are_up_and_know_their_speed_are_found(tmp_path: Path) -> None:
    interface(tmp_path, "eth0", speed="25000")
    interface(tmp_path, "eth1", speed="100000")
    interface(tmp_path, "eth2", speed="-1")
    interface(tmp_path, "eth3", speed="400000", state="down")
    interface(tmp_path, "docker0", speed="10000", is_device=False)
    found = node_topology(tmp_path, tmp_path / "none")
    assert [one.name for one in found.interfaces] == ["eth0", "eth1"]
    assert found.between_nodes == SystemLink("eth1", 12.5e9)


def test_active_rdma_ports_count_together_and_before_ethernet(tmp_path: Path) -> None:
    interface(tmp_path / "net", "eth0", speed="25000")
    for number in range(4):
        port(tmp_path / "rdma", f"mlx5_{number}", rate="400 Gb/sec (4X NDR)")
    port(tmp_path / "rdma", "mlx5_9", rate="400 Gb/sec (4X NDR)", state="1: DOWN")
    found = node_topology(tmp_path / "net", tmp_path / "rdma").between_nodes
    assert found is not None
    assert found.bytes_per_s == 4 * 50e9


@pytest.mark.parametrize(
    ("num_links", "name", "rate"), [(18, "18 NVLinks", 450e9), (0, "PCIe 5.0 x16", 5 * 0.7876 * 16e9)]
)
def test_a_gpu_sends_through_its_nvlinks_or_else_its_lanes(
    monkeypatch: pytest.MonkeyPatch, num_links: int, name: str, rate: float
) -> None:
    driver = types.SimpleNamespace(
        NVMLError=type("NVMLError", (Exception,), {}),
        NVML_NVLINK_MAX_LINKS=18,
        nvmlDeviceGetNvLinkState=lambda handle, at: int(at < num_links),
        nvmlDeviceGetNvLinkVersion=lambda handle, at: 4,
        nvmlDeviceGetMaxPcieLinkGeneration=lambda handle: 5,
        nvmlDeviceGetCurrPcieLinkWidth=lambda handle: 16,
    )
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setattr(module, "open_gpus", lambda: {0: object()})
    found = node_topology(Path("none"), Path("none")).between_gpus
    assert found is not None
    assert (found.name, found.bytes_per_s) == (name, pytest.approx(rate, rel=0.01))


def test_devices_share_the_network_of_their_node_and_it_is_marked() -> None:
    near = DeviceLink(Rate(1e-6, "measured"), Rate(1e11, "measured"))
    told = _link_between_nodes(NodeTopology(interfaces=(SystemLink("eth1", 12.5e9),)), near, 8)
    assert told.bytes_per_s.value == 12.5e9 / 8
    unknown = _link_between_nodes(NodeTopology(), near, 8)
    assert unknown.bytes_per_s.value == near.bytes_per_s.value
    assert not told.bytes_per_s.is_measured
    assert not unknown.bytes_per_s.is_measured


def test_a_prediction_within_a_node_does_not_name_the_network() -> None:
    machine = this_machine(2)
    assert "latency and bandwidth between nodes" not in machine.not_measured("fp32", num_ranks=2)
    assert "latency and bandwidth between nodes" in machine.not_measured("fp32", num_ranks=4)
