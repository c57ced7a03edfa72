"""When operations start: in which order, how many at a time, how fast."""

from torsh_distributed.comm.scheduler.bandwidth import BandwidthMonitor
from torsh_distributed.comm.scheduler.ordering import SchedulingStrategy
from torsh_distributed.comm.scheduler.rate import TokenBucket
from torsh_distributed.comm.scheduler.scheduler import CommunicationScheduler
from torsh_distributed.comm.scheduler.tally import SchedulerStats
from torsh_distributed.comm.scheduler.task import Priority, ScheduledWork

__all__ = [
    "BandwidthMonitor",
    "CommunicationScheduler",
    "Priority",
    "ScheduledWork",
    "SchedulerStats",
    "SchedulingStrategy",
    "TokenBucket",
]
