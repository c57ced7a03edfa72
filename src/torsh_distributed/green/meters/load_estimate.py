"""An estimate of a node's power from the load of its processors, where no counter can be read. Always labelled so."""

from __future__ import annotations

import csv
import importlib.metadata
import os
from collections.abc import Iterator
from pathlib import Path

from torsh_distributed.green.meters.counter_meter import DeviceState, MeterReading

CORE_W = 6.0
"""Assumed for a core if no table has the processor: a server's processors have a thermal design power of 3 to 10 W
a core."""
IDLE_SHARE = 0.1
"""Of the full power, at no load."""
_TABLE = "codecarbon/data/hardware/cpu_power.csv"


class LoadEstimate:
    """power = full power × (0.1 + 0.9 × load), with the load of the whole node from /proc/stat."""

    def __init__(
        self, ranks: tuple[int, ...], *, now_s: float, full_w: float | None = None, proc: Path = Path("/proc")
    ) -> None:
        """`full_w` is the user's; else the thermal design power of a table, else an assumption for each core."""
        self._proc = proc
        self._ranks = ranks
        self._full_w, self._how = (full_w, "given in the plan") if full_w is not None else full_power(proc)
        self._last_s = now_s
        self._last = _cpu_times(proc)

    @property
    def formula(self) -> str:
        """How the number is made."""
        return f"{self._full_w:.0f} W ({self._how}) × ({IDLE_SHARE} + {1 - IDLE_SHARE} × load); not measured"

    def read(self, now_s: float) -> MeterReading:
        """The estimate for the time since the last reading."""
        busy, total = _cpu_times(self._proc)
        spent = total - self._last[1]
        load = min(1.0, max(0.0, (busy - self._last[0]) / spent)) if spent > 0 else 0.0
        duration_s = now_s - self._last_s
        self._last, self._last_s = (busy, total), now_s
        joules = self._full_w * (IDLE_SHARE + (1 - IDLE_SHARE) * load) * duration_s
        state = DeviceState(utilization=load)
        return MeterReading("processors", "estimate", False, joules, duration_s, self._ranks, self.formula, state)


def full_power(proc: Path = Path("/proc")) -> tuple[float, str]:
    """(watts at full load, where the number comes from) for this node's processors."""
    model, num_packages = _processor(proc)
    num_cores = os.cpu_count() or 1
    if model:
        wanted = _words(model)
        for name, watts in _design_powers():
            if _words(name) <= wanted:
                return watts * num_packages, f"{num_packages} × {name}, {watts:.0f} W by codecarbon's table"
    return CORE_W * num_cores, f"{num_cores} cores × {CORE_W:g} W, assumed: no table has {model or 'this processor'}"


def library_file(name: str) -> Path | None:
    """A data file of codecarbon, which is looked up and not imported; None if it is not installed."""
    try:
        found = importlib.metadata.distribution("codecarbon").locate_file(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(found))
    return path if path.is_file() else None


def _design_powers() -> Iterator[tuple[str, float]]:
    path = library_file(_TABLE)
    if path is None:
        return
    with path.open(newline="", encoding="utf-8") as file:
        rows = [(row["Name"], watts) for row in csv.DictReader(file) if (watts := _watts(row.get("TDP"))) is not None]
    # The longest name first: `Xeon Gold 6154` before `Xeon`.
    yield from sorted(rows, key=lambda row: -len(row[0]))


def _watts(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:  # some rows of the table are damaged
        return None


def _words(name: str) -> frozenset[str]:
    plain = name.lower().replace("(r)", " ").replace("(tm)", " ")
    return frozenset(word for word in plain.split() if word not in ("cpu", "processor", "@"))


def _processor(proc: Path) -> tuple[str, int]:
    """(the model's name or nothing, the number of packages)."""
    try:
        text = (proc / "cpuinfo").read_text()
    except OSError:
        return "", 1
    values: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        values.setdefault(key.strip(), []).append(value.strip())
    return next(iter(values.get("model name", [])), ""), max(1, len(set(values.get("physical id", []))))


def _cpu_times(proc: Path) -> tuple[float, float]:
    """(busy, all) ticks of all cores since the machine was started."""
    ticks = [float(one) for one in (proc / "stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = ticks[3] + ticks[4]
    return sum(ticks) - idle, sum(ticks)
