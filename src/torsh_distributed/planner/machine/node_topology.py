"""What connects devices and nodes, as the system tells it: network interfaces, RDMA ports, NVLink and PCIe of a GPU.

These are speeds that hardware is built or connected for; nothing is sent. A prediction that uses them says that they
are not measured.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torsh_distributed.errors import FeatureNotAvailable
from torsh_distributed.observe.metrics.gpu_sensors import answer_of, open_gpus

_INTERFACES = Path("/sys/class/net")
_RDMA = Path("/sys/class/infiniband")
_GBIT = 1e9 / 8
_NVLINK_GB_PER_S: Mapping[int, float] = {1: 20, 2: 25, 3: 25, 4: 25, 5: 50}
"""One link in one direction, by NVML's version of it."""
_PCIE_LANE_GB_PER_S: Mapping[int, float] = {3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""One lane in one direction, by generation."""


@dataclass(frozen=True)
class SystemLink:
    """A link that the system lists."""

    name: str
    bytes_per_s: float
    """In one direction."""


@dataclass(frozen=True)
class NodeTopology:
    """The links of this node."""

    interfaces: tuple[SystemLink, ...] = ()
    """Network interfaces that are up and are devices, and whose speed is known."""
    rdma: tuple[SystemLink, ...] = ()
    """Active ports of InfiniBand and RoCE."""
    between_gpus: SystemLink | None = None
    """What a GPU sends to others of this node through; None without GPUs, or where the driver does not say."""

    @property
    def between_nodes(self) -> SystemLink | None:
        """All RDMA ports together, for each GPU sends through one near it; else the fastest interface."""
        if self.rdma:
            total = sum(one.bytes_per_s for one in self.rdma)
            return SystemLink(f"{len(self.rdma)} RDMA ports ({self.rdma[0].name}, …)", total)
        return max(self.interfaces, key=lambda one: one.bytes_per_s, default=None)


def node_topology(interfaces: Path = _INTERFACES, rdma: Path = _RDMA) -> NodeTopology:
    """What the kernel and NVIDIA's driver list on this node."""
    return NodeTopology(_interfaces(interfaces), _rdma_ports(rdma), _between_gpus())


def _interfaces(folder: Path) -> tuple[SystemLink, ...]:
    found = []
    for one in sorted(folder.glob("*")):
        mbit = _number(one / "speed")  # -1 where a virtual machine's device does not know it
        if (one / "device").exists() and mbit is not None and mbit > 0 and _text(one / "operstate") != "down":
            found.append(SystemLink(one.name, mbit * 1e-3 * _GBIT))
    return tuple(found)


def _rdma_ports(folder: Path) -> tuple[SystemLink, ...]:
    found = []
    for port in sorted(folder.glob("*/ports/*")):
        gbit = _number(port / "rate")  # such as 400 Gb/sec (4X NDR)
        if gbit is not None and "ACTIVE" in (_text(port / "state") or ""):
            found.append(SystemLink(f"{port.parents[1].name}/{port.name}", gbit * _GBIT))
    return tuple(found)


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:  # an interface without a carrier refuses to tell its speed
        return None


def _number(path: Path) -> float | None:
    match = re.match(r"-?[0-9.]+", _text(path) or "")
    return float(match.group()) if match else None


def _between_gpus() -> SystemLink | None:
    try:
        handles = open_gpus()
    except FeatureNotAvailable:  # there is a driver, and its package is not installed: the planner goes on without
        return None
    return _link_of(handles[0]) if 0 in handles else None


def _link_of(handle: Any) -> SystemLink | None:
    """All active NVLinks of a GPU together, else its PCIe lanes."""
    import pynvml as nvml

    places = range(nvml.NVML_NVLINK_MAX_LINKS)
    active = [at for at in places if answer_of(nvml.nvmlDeviceGetNvLinkState, handle, at)]
    rates = [_NVLINK_GB_PER_S.get(answer_of(nvml.nvmlDeviceGetNvLinkVersion, handle, at), 0.0) for at in active]
    if sum(rates) > 0:
        return SystemLink(f"{len(active)} NVLinks", sum(rates) * 1e9)
    # An idle GPU lowers its generation: what it can do is the largest one.
    generation = answer_of(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle)
    lanes = answer_of(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle)
    if generation not in _PCIE_LANE_GB_PER_S or not lanes:
        return None
    return SystemLink(f"PCIe {generation}.0 x{lanes}", _PCIE_LANE_GB_PER_S[generation] * lanes * 1e9)
