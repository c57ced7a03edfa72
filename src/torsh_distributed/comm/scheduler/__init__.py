"""When operations start: in which order, how many at a time, how fast. Read `queue` for the rules, then `scheduler`."""

from torsh_distributed.comm.scheduler.queue import Priority, ScheduledWork
from torsh_distributed.comm.scheduler.rate import BandwidthMonitor
from torsh_distributed.comm.scheduler.scheduler import CommunicationScheduler, SchedulerStats

__all__ = [
    "BandwidthMonitor",
    "CommunicationScheduler",
    "Priority",
    "ScheduledWork",
    "SchedulerStats",
]
