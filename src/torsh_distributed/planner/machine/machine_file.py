"""What was measured of a machine, in a file: with what it was measured on, when, and how much it varied.

A file is for one machine and one software: another processor, GPU, driver or torch makes it stale.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan.reading.files import write_atomically
from torsh_distributed.planner.machine.link_measuring import Interference
from torsh_distributed.planner.machine.measured_rates import CodecRate, OperationRates, ProductTable, SizeTable
from torsh_distributed.planner.machine.past_runs import NO_RUNS, PARTS, PastRun, PastRuns
from torsh_distributed.private_files import state_directory
from torsh_distributed.unreadable_data import unreadable_as

FORMAT = 2
_MOST_RUNS = 200
_CPU_FACTS = Path("/proc/cpuinfo")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measuring, with some ranks at work on the machine."""

    num_ranks: int
    date: str
    spread: float
    """Of a typical point: largest less smallest block, over the median."""
    rates: OperationRates
    collectives: Mapping[str, SizeTable] = field(default_factory=dict)
    """By operation; empty for one rank."""
    interference: Interference | None = None
    codecs: Mapping[str, CodecRate] = field(default_factory=dict)
    """By method; empty in files from before they were measured."""


@dataclass(frozen=True)
class MachineFile:
    """All measurements of one machine."""

    fingerprint: Mapping[str, str]
    by_ranks: Mapping[int, Measurement]
    past: PastRuns = NO_RUNS
    """Recorded runs since then, beside what was predicted of them."""

    def save(self, path: Path) -> None:
        """Write it, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        found = {str(count): asdict(one) for count, one in sorted(self.by_ranks.items())}
        runs = [asdict(one) for one in self.past.runs[-_MOST_RUNS:]]
        document = {"format": FORMAT, "fingerprint": dict(self.fingerprint), "by_ranks": found, "runs": runs}
        write_atomically(path, json.dumps(document, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> MachineFile:
        """Read what `save` wrote. Raises ConfigurationError for anything else."""
        hint = "measure again: torsh bench machine"
        with unreadable_as(
            ConfigurationError, "the file does not describe a measured machine", hint=hint, path=str(path)
        ):
            document = json.loads(path.read_bytes())
            if document["format"] != FORMAT:
                raise ValueError(f"its format is {document['format']}, and this version reads {FORMAT}")
            return cls(
                {str(name): str(value) for name, value in document["fingerprint"].items()},
                {int(one): measurement_from(found) for one, found in document["by_ranks"].items()},
                PastRuns(tuple(_run(one) for one in document.get("runs", []))),
            )

    def differences(self) -> list[str]:
        """What is different here from where it was measured; then it is stale."""
        here = fingerprint()
        return [
            f"{name}: {self.fingerprint.get(name)} then, {here.get(name)} now"
            for name in sorted({*here, *self.fingerprint})
            if here.get(name) != self.fingerprint.get(name)
        ]


def fingerprint() -> dict[str, str]:
    """What decides how fast this machine is."""
    found = {"processor": _processor(), "cores": str(os.cpu_count()), "torch": torch.__version__}
    if torch.cuda.is_available():
        found["gpu"] = f"{torch.cuda.device_count()} × {torch.cuda.get_device_name(0)}"
        found["cuda"] = str(torch.version.cuda)
    return found


def _processor() -> str:
    try:
        lines = _CPU_FACTS.read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part"))]
    return names[0] if names else platform.machine()


def machine_path() -> Path:
    """Where this machine's file is: in the user's state directory."""
    return state_directory() / "machine.json"


def measurement_from(found: Mapping[str, Any]) -> Measurement:
    """The measurement in what `asdict` made of one."""
    rates = found["rates"]
    interference = found["interference"]
    return Measurement(
        num_ranks=int(found["num_ranks"]),
        date=str(found["date"]),
        spread=float(found["spread"]),
        rates=OperationRates(
            products={name: ProductTable.read(one) for name, one in rates["products"].items()},
            attention={name: SizeTable.read(one) for name, one in rates["attention"].items()},
            families={name: SizeTable.read(one) for name, one in rates["families"].items()},
            launch_s=float(rates["launch_s"]),
            backward_launch_s=float(rates["backward_launch_s"]),
            update=SizeTable.read(rates["update"]),
        ),
        collectives={name: SizeTable.read(one) for name, one in found["collectives"].items()},
        interference=None
        if interference is None
        else Interference(**{one: float(interference[one]) for one in interference}),
        codecs={method: CodecRate.read(one) for method, one in found.get("codecs", {}).items()},
    )


def _run(found: Mapping[str, Any]) -> PastRun:
    predicted, measured = ({part: float(found[name][part]) for part in PARTS} for name in ("predicted_s", "measured_s"))
    return PastRun(
        date=str(found["date"]),
        what=str(found["what"]),
        num_ranks=int(found["num_ranks"]),
        predicted_s=predicted,
        measured_s=measured,
    )
