"""What a machine can do, as rates: measured here, or taken from a description and marked *not measured*."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from torsh_distributed.errors import ConfigurationError, InvalidArgument
from torsh_distributed.plan.problems import did_you_mean
from torsh_distributed.planner.machine.measured_rates import CodecRate, OperationRates, SizeTable
from torsh_distributed.planner.machine.past_runs import NO_RUNS, PastRuns

NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Rate:
    """A number of a machine, and where it is from."""

    value: float
    source: str
    """The date of a measurement and its spread, or *not measured* with the data sheet."""

    @property
    def is_measured(self) -> bool:
        """Whether it was measured on the machine."""
        return not self.source.startswith(NOT_MEASURED)


@dataclass(frozen=True)
class DeviceLink:
    """What carries a message between two ranks."""

    latency_s: Rate
    bytes_per_s: Rate
    tables: Mapping[int, Mapping[str, SizeTable]] = field(default_factory=dict)
    """Measured collectives: number of ranks to operation to seconds by bytes."""

    def ring_s(self, num_bytes: float, num_ranks: int, *, laps: int) -> float:
        """A collective over `num_ranks`: one lap gathers or reduces into shards, two laps reduce everywhere.

        As measured with so many ranks; else as a ring of messages.
        """
        if num_ranks == 1 or num_bytes == 0:
            return 0.0
        if num_ranks in self.tables:
            return self.tables[num_ranks]["all_gather" if laps == 1 else "all_reduce"].seconds_at(num_bytes)
        steps = laps * (num_ranks - 1)
        return steps * (self.latency_s.value + num_bytes / num_ranks / self.bytes_per_s.value)

    def send_s(self, num_bytes: float) -> float:
        """One message."""
        return self.latency_s.value + num_bytes / self.bytes_per_s.value


@dataclass(frozen=True, kw_only=True)
class MachineProfile:
    """A node of some devices, and what connects nodes."""

    name: str
    device_type: str
    memory_bytes: float
    """Of one device."""
    flops: Mapping[str, Rate]
    """Matrix products, by format as in `precision.dtype`: operations in a second."""
    memory_rate: Rate
    """Bytes in a second that operations without arithmetic read and write."""
    launch_s: Rate
    """Of one kernel, from the host."""
    near: DeviceLink
    """Between devices of a node."""
    far: DeviceLink
    """Between nodes, for each device."""
    devices_per_node: int
    overlap: Rate = Rate(1.0, f"{NOT_MEASURED}: communication is taken to be hidden as far as there is computation")
    """How much of the shorter of two, a computation and a communication at the same time, costs nothing: 0 to 1."""
    rates: OperationRates | None = None
    """Measured times of operations by shape and size, which then count in place of `flops` and `memory_rate`."""
    codecs: Mapping[str, CodecRate] = field(default_factory=dict)
    """Measured methods of compression."""
    past: PastRuns = NO_RUNS
    """Recorded runs, which predictions are corrected by."""

    def link(self, num_ranks_apart: int) -> DeviceLink:
        """What connects ranks of which the outermost are so many places apart."""
        return self.near if num_ranks_apart <= self.devices_per_node else self.far

    def not_measured(self, dtype: str, *, num_ranks: int | None = None) -> list[str]:
        """The inputs of a prediction for so many ranks that are not measured; None: for more than a node."""
        named = {
            f"{dtype} operations in a second": self.flops.get(dtype) or self.flops["bf16"],
            "memory bandwidth": self.memory_rate,
            "launch of a kernel": self.launch_s,
        }
        if num_ranks is None or num_ranks > 1:
            named["latency and bandwidth in a node"] = self.near.bytes_per_s
            named["how much communication is hidden"] = self.overlap
        if num_ranks is None or num_ranks > self.devices_per_node:
            named["latency and bandwidth between nodes"] = self.far.bytes_per_s
        return [name for name, rate in named.items() if not rate.is_measured]


_KEYS: Mapping[str, tuple[str, ...]] = {
    "device": ("name", "type", "memory_gb", "memory_gb_per_s", "launch_us", "per_node", "source"),
    "tflops": ("fp32", "bf16", "fp16", "fp8"),
    "near": ("gb_per_s", "latency_us"),
    "far": ("gb_per_s", "latency_us"),
}


def described_machines() -> dict[str, Path]:
    """The descriptions that come with this library, by name."""
    folder = Path(str(files("torsh_distributed.planner.machine") / "descriptions"))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def machine_named(name: str) -> MachineProfile:
    """The machine of a description file, or of one that comes with this library, such as h100."""
    path = Path(name) if name.endswith(".toml") else _own_description(name)
    if not path.exists():
        raise InvalidArgument(f"there is no file {path}", hint="see the guide for what a description says")
    return read_machine(path)


def _own_description(name: str) -> Path:
    known = described_machines()
    if name.lower() not in known:
        raise InvalidArgument(
            f"there is no description of a machine {name}",
            hint=did_you_mean(name.lower(), known) or f"known: {', '.join(known)}; or name a .toml file of yours",
        )
    return known[name.lower()]


def read_machine(path: Path) -> MachineProfile:
    """The machine in a description file: every number of it is marked as not measured.

    One that names a description of this library as `like`, beside its own name, says what is different from that one.
    """
    document = _document(path)
    problems = list(_problems(document))
    if problems:
        raise ConfigurationError(
            f"{path} does not describe a machine: {'; '.join(problems)}",
            hint="compare it with a description that comes with the library",
        )
    device, source = document["device"], document["device"].get("source", "a description")

    def rate(value: float) -> Rate:
        return Rate(value, f"{NOT_MEASURED}: {source}")

    def link(section: Mapping[str, float]) -> DeviceLink:
        return DeviceLink(rate(section["latency_us"] * 1e-6), rate(section["gb_per_s"] * 1e9))

    flops = {name: rate(value * 1e12) for name, value in document["tflops"].items()}
    flops.setdefault("fp16", flops["bf16"])
    return MachineProfile(
        name=device["name"],
        device_type=device.get("type", "cuda"),
        memory_bytes=device["memory_gb"] * 1e9,
        flops=flops,
        memory_rate=rate(device["memory_gb_per_s"] * 1e9),
        launch_s=rate(device["launch_us"] * 1e-6),
        near=link(document["near"]),
        far=link(document["far"]),
        devices_per_node=device["per_node"],
    )


def _document(path: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: {error}", hint="a description is a TOML file") from error
    device = document.get("device")
    like = device.pop("like", None) if isinstance(device, dict) else None
    if like is None:
        return document
    whole = tomllib.loads(_own_description(str(like)).read_text())
    for section, keys in document.items():
        whole[section] = {**whole.get(section, {}), **keys} if isinstance(keys, dict) else keys
    return whole


def _problems(document: Mapping[str, Any]) -> Iterable[str]:
    for section in document:
        if section not in _KEYS:
            yield f"[{section}] is not known ({did_you_mean(section, _KEYS) or 'known: ' + ', '.join(_KEYS)})"
    for section, keys in _KEYS.items():
        found = document.get(section)
        if not isinstance(found, dict):
            yield f"there is no [{section}]"
            continue
        for key, value in found.items():
            if key not in keys:
                yield f"{section}.{key} is not known ({did_you_mean(key, keys) or 'known: ' + ', '.join(keys)})"
            elif key not in ("name", "type", "source") and not (isinstance(value, int | float) and value > 0):
                yield f"{section}.{key} is {value!r}, not a number above 0"
        optional = ("type", "source", "fp16", "fp8")
        yield from (f"{section}.{key} is missing" for key in keys if key not in found and key not in optional)
    near, far = document.get("near", {}).get("gb_per_s"), document.get("far", {}).get("gb_per_s")
    if isinstance(near, int | float) and isinstance(far, int | float) and far > near:
        yield f"far.gb_per_s {far} is above near.gb_per_s {near}, so nodes would be nearer than devices of a node"
