"""Measures the machine that this runs on, in about a second: products, memory, launches."""

from __future__ import annotations

import datetime
import logging
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from torsh_distributed.planner.machine.machine_file import MachineFile, Measurement, machine_path
from torsh_distributed.planner.machine.machine_profile import NOT_MEASURED, DeviceLink, MachineProfile, Rate
from torsh_distributed.planner.machine.node_topology import NodeTopology, node_topology
from torsh_distributed.planner.machine.past_runs import NO_RUNS, PastRuns

_log = logging.getLogger(__name__)

_REPEATS = 7
_SIDE = {"cpu": 384, "cuda": 4096}
_COPIED_BYTES = {"cpu": 2**25, "cuda": 2**30}
_ON_LINKS = f"{NOT_MEASURED}: a quarter of the memory's rate, for a copy into and out of shared memory"
_RDMA_LATENCY_S, _ETHERNET_LATENCY_S = 8e-6, 50e-6


def this_machine(num_ranks: int = 1, *, path: Path | None = None) -> MachineProfile:
    """The machine at hand with `num_ranks` on it: its GPU if it has one, else its CPU, divided between the ranks.

    As `torsh bench machine` has measured it with so many ranks; `path` is its file, left out the usual one. Else some
    numbers are measured now, in about a second: links between ranks are not, and marked.
    """
    return known_machine(num_ranks, path=path) or _measured_now(num_ranks)


def known_machine(num_ranks: int, *, path: Path | None = None) -> MachineProfile | None:
    """The machine at hand as its file has it; None if it was not measured with so many ranks."""
    path = path or machine_path()
    if not path.exists():
        return None
    file = MachineFile.load(path)
    stale = file.differences()
    if stale:
        _log.warning("%s is not used, it is of another machine (%s): torsh bench machine", path, "; ".join(stale))
        return None
    return measured_machine(file.by_ranks[num_ranks], file.past) if num_ranks in file.by_ranks else None


def measured_machine(found: Measurement, past: PastRuns = NO_RUNS) -> MachineProfile:
    """The machine as it was measured with some ranks on it, and what runs on it have taught since."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    rates, source = found.rates, f"measured {found.date}, spread {found.spread:.0%}"
    elementwise = rates.families["elementwise"]
    flops = {
        name: Rate(max(rate for plane in table.flops_per_s for line in plane for rate in line), source)
        for name, table in rates.products.items()
    }
    low = flops.get("bf16", flops["fp32"])
    interference, near = found.interference, _measured_link(found, source)
    per_node = max(found.num_ranks, torch.cuda.device_count())
    return MachineProfile(
        name=_name(kind),
        device_type=kind,
        memory_bytes=_memory_bytes(kind, found.num_ranks),
        flops={"fp32": flops["fp32"], "bf16": low, "fp16": low, "fp8": low},
        memory_rate=Rate(elementwise.sizes[-1] / elementwise.seconds[-1], source),
        launch_s=Rate(elementwise.seconds[0] + rates.launch_s, source),
        near=near,
        far=_link_between_nodes(node_topology(), near, per_node),
        devices_per_node=per_node,
        overlap=Rate(0.0 if interference is None else interference.overlap, source),
        rates=rates,
        codecs=found.codecs,
        past=past,
    )


def _measured_link(found: Measurement, source: str) -> DeviceLink:
    """Latency and bandwidth of a ring that would take as long as the all-reduces did."""
    table, count = found.collectives.get("all_reduce"), found.num_ranks
    if table is None:
        return DeviceLink(Rate(0.0, source), Rate(float("inf"), source))
    byte_s = max(1e-13, (table.seconds[-1] - table.seconds[0]) / (table.sizes[-1] - table.sizes[0]))
    latency_s = Rate(table.seconds[0] / (2 * (count - 1)), source)
    rate = Rate(2 * (count - 1) / count / byte_s, source)
    return DeviceLink(latency_s, rate, {count: found.collectives})


def _link_between_nodes(topology: NodeTopology, near: DeviceLink, per_node: int) -> DeviceLink:
    """What a device gets of the node's network; where the system does not tell its speed, as between devices."""
    link = topology.between_nodes
    if link is None:
        source = f"{NOT_MEASURED}: as in a node, for the system does not tell the speed of its network"
        return DeviceLink(Rate(near.latency_s.value, source), Rate(near.bytes_per_s.value, source))
    source = (
        f"{NOT_MEASURED}: what the system says of {link.name}, shared by {per_node} devices; latency is a round number"
    )
    latency_s = _RDMA_LATENCY_S if topology.rdma else _ETHERNET_LATENCY_S
    return DeviceLink(Rate(latency_s, source), Rate(link.bytes_per_s / per_node, source))


def _name(kind: str) -> str:
    return torch.cuda.get_device_name(0) if kind == "cuda" else "this machine's CPU"


def _measured_now(num_ranks: int) -> MachineProfile:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind)
    threads = torch.get_num_threads()
    if kind == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))
    try:
        flops = {"fp32": _product_rate(device, torch.float32)}
        low = _product_rate(device, torch.bfloat16) if kind == "cuda" else flops["fp32"]
        rate = _copy_rate(device)
        launch = _launch(device)
    finally:
        torch.set_num_threads(threads)
    topology, per_node = node_topology(), max(num_ranks, torch.cuda.device_count())
    near = DeviceLink(Rate(launch.value, _ON_LINKS), Rate(rate.value / 4, _ON_LINKS))
    if topology.between_gpus is not None and kind == "cuda":
        told = f"{NOT_MEASURED}: what the system says of {topology.between_gpus.name}"
        near = DeviceLink(Rate(launch.value, told), Rate(topology.between_gpus.bytes_per_s, told))
    return MachineProfile(
        name=_name(kind),
        device_type=kind,
        memory_bytes=_memory_bytes(kind, num_ranks),
        flops={**flops, "bf16": low, "fp16": low, "fp8": low},
        memory_rate=rate,
        launch_s=launch,
        near=near,
        far=_link_between_nodes(topology, near, per_node),
        devices_per_node=per_node,
    )


def _memory_bytes(kind: str, num_ranks: int) -> float:
    if kind == "cuda":
        return float(torch.cuda.get_device_properties(0).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / num_ranks


def _timed(work: Callable[[], object], device: torch.device) -> tuple[float, str]:
    """The median of some runs, and what to say of it."""
    times = []
    for _ in range(_REPEATS + 1):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    times = times[1:]  # the first one allocates
    middle = statistics.median(times)
    spread = (max(times) - min(times)) / middle
    return middle, f"measured {datetime.date.today().isoformat()}, spread {spread:.0%}"


def _product_rate(device: torch.device, dtype: torch.dtype) -> Rate:
    side = _SIDE[device.type]
    left, right = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
    seconds, source = _timed(lambda: left @ right, device)
    return Rate(2 * side**3 / seconds, source)


def _copy_rate(device: torch.device) -> Rate:
    values = torch.ones(_COPIED_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(values)
    seconds, source = _timed(lambda: target.copy_(values), device)
    return Rate(2 * values.nbytes / seconds, source)


def _launch(device: torch.device) -> Rate:
    one = torch.ones(1, device=device)
    count = 200

    def many() -> None:
        for _ in range(count):
            one.add_(1)

    seconds, source = _timed(many, device)
    return Rate(seconds / count, source)
