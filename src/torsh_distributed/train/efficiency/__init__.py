"""Where the time of a step goes, by axis of the mesh (`meter`, `report`), and how much of the hardware's
arithmetic it uses (`utilization`)."""

from torsh_distributed.train.efficiency.meter import EfficiencyMeter
from torsh_distributed.train.efficiency.report import AxisTime, EfficiencyReport, StepTimes
from torsh_distributed.train.efficiency.utilization import UtilizationMeter, UtilizationReport

__all__ = ["AxisTime", "EfficiencyMeter", "EfficiencyReport", "StepTimes", "UtilizationMeter", "UtilizationReport"]
