"""The devices of this node that reach other nodes' memory: InfiniBand and RoCE, as the kernel lists them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Literal

from torsh_distributed.errors import FeatureNotAvailable

RdmaLink = Literal["infiniband", "roce"]
_FOLDER = Path("/sys/class/infiniband")
_LINK_LAYERS: dict[RdmaLink, str] = {"infiniband": "InfiniBand", "roce": "Ethernet"}


def rdma_devices(folder: Path = _FOLDER) -> dict[str, str]:
    """The active ports of RDMA devices, such as `mlx5_0/1`, and what they speak: InfiniBand or Ethernet (RoCE)."""
    return {
        f"{port.parents[1].name}/{port.name}": (port / "link_layer").read_text().strip()
        for port in sorted(folder.glob("*/ports/*"))
        if "ACTIVE" in (port / "state").read_text()
    }


def require_rdma(link: RdmaLink, folder: Path = _FOLDER) -> None:
    """FeatureNotAvailable, with what was looked for, unless this node has an active port of this kind."""
    found = rdma_devices(folder)
    if _LINK_LAYERS[link] not in found.values():
        raise FeatureNotAvailable(
            f"this node has no active {link} device",
            hint="leave the device out: MPI then takes what there is",
            looked_for=f"{folder}/*/ports/*/link_layer with {_LINK_LAYERS[link]}, state ACTIVE",
            found=", ".join(f"{port}: {layer}" for port, layer in found.items()) or "none",
        )


def refuse_nixl() -> FeatureNotAvailable:
    """Why windows do not go over NIXL."""
    is_there = importlib.util.find_spec("nixl") is not None
    return FeatureNotAvailable(
        "windows over NIXL are not offered: it has no atomics, which windows have",
        hint="on a node leave the provider out; between nodes rpc.mpi_windows uses the same devices",
        looked_for="the module nixl, and RDMA devices",
        found=f"nixl {'installed' if is_there else 'not installed'}; devices: {', '.join(rdma_devices()) or 'none'}",
    )
