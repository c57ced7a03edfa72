"""Where the time of a step goes, measured while training runs, by axis of the mesh: `meter`, `account`, `report`."""

from torsh_distributed.train.efficiency.meter import EfficiencyMeter
from torsh_distributed.train.efficiency.report import AxisTime, EfficiencyReport, StepTimes

__all__ = ["AxisTime", "EfficiencyMeter", "EfficiencyReport", "StepTimes"]
