"""When operations start: in which order, how many at a time, how fast. Read `queue` for the rules, then `scheduler`."""

from torsh_distributed.comm.scheduler.bandwidth import BandwidthMonitor
from torsh_distributed.comm.scheduler.ordering import SchedulingStrategy
from torsh_distributed.comm.scheduler.scheduler import CommunicationScheduler
from torsh_distributed.comm.scheduler.scheduler_stats import SchedulerStats
from torsh_distributed.comm.scheduler.task import Priority, ScheduledWork

__all__ = [
    "BandwidthMonitor",
    "CommunicationScheduler",
    "Priority",
    "ScheduledWork",
    "SchedulerStats",
    "SchedulingStrategy",
]
