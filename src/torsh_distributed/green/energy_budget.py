"""A budget of energy or CO2: said at four fifths, acted on when it is spent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torsh_distributed.events import BudgetEvent, EnergyEvent

if TYPE_CHECKING:
    from torsh_distributed.plan.sections.green import GreenConfig

_WARN_AT = 0.8
_J_PER_KWH = 3.6e6


class EnergyBudget:
    """Adds up the energy of all nodes. Checked with every reading, so it is overspent by one interval at most."""

    def __init__(self, config: GreenConfig, kept: Mapping[str, Any] | None = None) -> None:
        """`kept` is `to_dict` of an earlier launcher of the run, whose spending counts."""
        self._action = config.on_budget
        self._limits = {
            "energy": (config.max_kwh, "kWh"),
            "energy of this epoch": (config.max_epoch_kwh, "kWh"),
            "CO2": (config.max_co2_kg, "kg"),
            "CO2 of this epoch": (config.max_epoch_co2_kg, "kg"),
        }
        self._spent = dict.fromkeys(self._limits, 0.0)
        self._said: dict[str, int] = {}
        self._shown: dict[str, tuple[int, str]] = {}
        self._epoch = 0
        if kept is not None:
            # What an earlier version did not count is not in it.
            self._spent |= {name: float(kept["spent"].get(name, 0.0)) for name in self._spent}
            if not all(0 <= one < math.inf for one in self._spent.values()):
                raise ValueError(f"it spent {self._spent}")
            self._epoch = int(kept["epoch"])

    @classmethod
    def wanted(cls, config: GreenConfig, kept: Mapping[str, Any] | None = None) -> EnergyBudget | None:
        """That of a plan; None if it has none. Raises KeyError, TypeError or ValueError if `kept` is damaged."""
        limits = (config.max_kwh, config.max_epoch_kwh, config.max_co2_kg, config.max_epoch_co2_kg)
        return cls(config, kept) if any(limits) else None

    def to_dict(self) -> dict[str, Any]:
        """What a later launcher of the run counts on from."""
        return {"spent": dict(self._spent), "epoch": self._epoch}

    def take_news(self) -> list[BudgetEvent]:
        """The budgets that were spent further by a hundredth, or have come to another stage, since the last call."""
        found = []
        for name, (limit, unit) in self._limits.items():
            if limit is None:
                continue
            spent = self._spent[name]
            action = ("ok", "warn", self._action)[self._said.get(name, 0)]
            shown = (int(100 * spent / limit), action)
            if self._shown.get(name) != shown:
                self._shown[name] = shown
                found.append(BudgetEvent(rank=-1, name=name, spent=spent, limit=limit, unit=unit, action=action))
        return found

    @property
    def is_slowing(self) -> bool:
        """Whether workers are to pause, because a budget is spent and that is what shall follow."""
        return self._action == "slow" and 2 in self._said.values()

    def begin_epoch(self, epoch: int) -> None:
        """A rank tells the epoch that it is in."""
        if epoch != self._epoch:
            self._epoch = epoch
            for name in ("energy of this epoch", "CO2 of this epoch"):
                self._spent[name] = 0.0
                self._said.pop(name, None)

    def take(self, event: EnergyEvent) -> list[tuple[str, str]]:
        """Add a reading: (warn, slow or stop; the sentence with the numbers) for each limit that it reaches."""
        kwh = event.joules / _J_PER_KWH
        self._spent["energy"] += kwh
        self._spent["energy of this epoch"] += kwh
        kg = kwh * (event.g_per_kwh or 0.0) / 1e3
        self._spent["CO2"] += kg
        self._spent["CO2 of this epoch"] += kg
        found: list[tuple[str, str]] = []
        for name, (limit, unit) in self._limits.items():
            if limit is None:
                continue
            spent = self._spent[name]
            stage = 2 if spent >= limit else 1 if spent >= _WARN_AT * limit else 0
            if stage > self._said.get(name, 0):
                self._said[name] = stage
                told = f"{spent:.4g} of {limit:g} {unit} {name} are spent ({spent / limit:.0%})"
                found.append(("warn", told) if stage == 1 else (self._action, told))
        return found
