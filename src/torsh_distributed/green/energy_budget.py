"""A budget of energy or CO2: said at four fifths, acted on when it is spent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torsh_distributed.events import EnergyEvent

if TYPE_CHECKING:
    from torsh_distributed.plan.sections.green import GreenConfig

_WARN_AT = 0.8
_J_PER_KWH = 3.6e6


class EnergyBudget:
    """Adds up the energy of all nodes. Checked with every reading, so it is overspent by one interval at most."""

    def __init__(self, config: GreenConfig) -> None:
        self._action = config.on_budget
        self._limits = {
            "energy": (config.max_kwh, "kWh"),
            "energy of this epoch": (config.max_epoch_kwh, "kWh"),
            "CO2": (config.max_co2_kg, "kg"),
        }
        self._spent = dict.fromkeys(self._limits, 0.0)
        self._said: dict[str, int] = {}
        self._epoch = 0

    @classmethod
    def wanted(cls, config: GreenConfig) -> EnergyBudget | None:
        """That of a plan; None if it has none."""
        return cls(config) if any((config.max_kwh, config.max_epoch_kwh, config.max_co2_kg)) else None

    def begin_epoch(self, epoch: int) -> None:
        """A rank tells the epoch that it is in."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._spent["energy of this epoch"] = 0.0
            self._said.pop("energy of this epoch", None)

    def take(self, event: EnergyEvent) -> list[tuple[str, str]]:
        """Add a reading: (warn, slow or stop; the sentence with the numbers) for each limit that it reaches."""
        kwh = event.joules / _J_PER_KWH
        self._spent["energy"] += kwh
        self._spent["energy of this epoch"] += kwh
        self._spent["CO2"] += kwh * (event.g_per_kwh or 0.0) / 1e3
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
