"""What a run costs in energy: the `green` section of a plan."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from typing import Literal

from pydantic import Field
from typing_extensions import override

from torsh_distributed.plan.problems import Problem
from torsh_distributed.plan.section import Section


class GreenConfig(Section):
    """Energy of a run, measured where the machine has meters and else estimated and labelled so."""

    enabled: bool = False
    """Read the node's meters while the job runs. `torsh run --green` does the same for one run."""

    interval_s: float = Field(default=1.0, ge=0.5, le=60)
    """Seconds between two readings of the meters. A GPU's counter moves ten times a second: shorter intervals would
    give steps too much or too little."""

    node_full_w: float | None = Field(default=None, gt=0)
    """Power of a node's processors at full load, for the estimate where they have no meter that can be read. Left out:
    the thermal design power of a table, or an assumption for each core."""

    carbon: Literal["none", "fixed", "file", "gb", "electricity_maps", "watttime", "country"] = "none"
    """Where the grid's carbon intensity comes from. Without it no grams are counted. `country` is a year's mean."""

    zone: str | None = Field(default=None, min_length=1)
    """The grid: GB, a zone of Electricity Maps, a region of WattTime, or for `country` a name or code such as DEU."""

    carbon_file: str | None = Field(default=None, min_length=1)
    """CSV with the columns time and g_per_kwh, for `carbon = "file"`."""

    carbon_url: str | None = Field(default=None, min_length=1)
    """Address of the feed instead of its own: a mirror or a proxy."""

    g_per_kwh: float | None = Field(default=None, ge=0)
    """Grams of CO2 for a kilowatt-hour, for `carbon = "fixed"`."""

    max_kwh: float | None = Field(default=None, gt=0)
    """Energy that the run may take. Left out: any."""

    max_epoch_kwh: float | None = Field(default=None, gt=0)
    """Energy that an epoch may take. Left out: any."""

    max_co2_kg: float | None = Field(default=None, gt=0)
    """CO2 that the run may cause; needs `carbon`. Left out: any."""

    max_epoch_co2_kg: float | None = Field(default=None, gt=0)
    """CO2 that an epoch may cause, likewise."""

    on_budget: Literal["warn", "slow", "stop"] = "warn"
    """What happens when a budget is spent: a warning; pauses between steps as long as the steps; or a checkpoint after
    the step and the end of the job, which can go on later."""

    power_cap_w: float | None = Field(default=None, gt=0)
    """Mean power that a node may take: its workers pause between steps. No setting of the machine is changed. Left out:
    no pauses."""

    gpu_limit_w: float | None = Field(default=None, gt=0)
    """Power limit of each GPU of the job, through the driver; needs root and a GPU that nobody else uses. What it was
    is put back at the end, also of a launcher that is killed. Left out: the limit stays."""

    strategy: Literal["none", "minimize_carbon", "minimize_energy", "maximize_renewable", "balanced"] = "none"
    """When the job trains, and with how many workers: where the grid emits least; with the fewest joules; while
    renewables are plenty; or by CO2 and renewables equally. Workers hold between two steps, and in an elastic job their
    number follows. Needs a forecast, and a deadline that is kept."""

    deadline: str | None = Field(default=None, min_length=1)
    """When the job must be done: 96h or 4d from its first start, or a time such as 2026-11-20T18:00Z."""

    work_hours: float | None = Field(default=None, gt=0)
    """How long all of it takes with one worker, by which the job may begin later. Left out: it begins at once, and what
    its first steps took is taken."""

    worker_efficiency: float = Field(default=0.9, gt=0, le=1)
    """What each further worker adds to the speed, over the first, until it is measured."""

    renewable_train: float = Field(default=0.5, ge=0, le=1)
    """For `maximize_renewable`: the renewable share above which all workers train."""

    renewable_hold: float = Field(default=0.2, ge=0, le=1)
    """For `maximize_renewable`: the renewable share below which none does. Between the two half of them do."""

    cpu_governor: str | None = Field(default=None, min_length=1)
    """The kernel's governor of the processors' clocks, such as powersave; needs root and a machine that has clocks to
    set. What it was is put back at the end, as for the GPUs' limit. Left out: it stays."""

    cpu_max_mhz: float | None = Field(default=None, gt=0)
    """Highest clock of the processors, likewise."""

    cpu_limit_w: float | None = Field(default=None, gt=0)
    """Power limit of each processor package by RAPL, likewise."""

    @override
    def find_problems(self) -> Iterator[Problem]:
        """What a feed needs, and what has no effect without one."""
        needs = {"fixed": "g_per_kwh", "file": "carbon_file"}
        zoned = ("electricity_maps", "watttime", "country")
        needed = needs.get(self.carbon) or ("zone" if self.carbon in zoned else None)
        if needed is not None and getattr(self, needed) is None:
            yield Problem(needed, f'green.carbon = "{self.carbon}" needs green.{needed}', f"set green.{needed}")
        if self.carbon == "gb" and self.zone not in (None, "GB"):
            yield Problem("zone", 'green.carbon = "gb" knows the zone GB alone', "leave green.zone out")
        for key in ("g_per_kwh", "carbon_file"):
            if getattr(self, key) is not None and needs.get(self.carbon) != key:
                yield Problem(key, f'green.{key} has no effect with green.carbon = "{self.carbon}"', "leave it out")
        for key in ("max_co2_kg", "max_epoch_co2_kg"):
            if getattr(self, key) is not None and self.carbon == "none":
                yield Problem(key, f"green.{key} needs a carbon intensity", "set green.carbon")
        yield from self._problems_of_strategy()

    def _problems_of_strategy(self) -> Iterator[Problem]:
        if self.strategy == "none":
            for key in ("deadline", "work_hours"):
                if getattr(self, key) is not None:
                    yield Problem(key, f"green.{key} has no effect without green.strategy", "set green.strategy")
            return
        if self.deadline is None:
            yield Problem(
                "deadline", f'green.strategy = "{self.strategy}" needs green.deadline', 'set "96h", or a time'
            )
        elif not _is_deadline(self.deadline):
            told = f"green.deadline is a time or how long from the first start, not {self.deadline[:60]!r}"
            yield Problem("deadline", told, 'set "96h", "4d", "90m", or a time such as "2026-11-20T18:00Z"')
        if self.carbon in ("none", "fixed", "country") and self.strategy != "minimize_energy":
            told = f'green.strategy = "{self.strategy}" needs a feed whose values change with time'
            yield Problem("carbon", told, "set green.carbon to file, gb, electricity_maps or watttime")
        if self.renewable_hold > self.renewable_train:
            told = "green.renewable_hold is at most green.renewable_train"
            yield Problem("renewable_hold", told, "leave both at their defaults of 0.2 and 0.5")


def _is_deadline(text: str) -> bool:
    try:
        return bool(re.fullmatch(r"\d+(\.\d+)?[mhd]", text.strip()) or datetime.fromisoformat(text.strip()))
    except ValueError:
        return False
