"""Memory as events: what this process uses, and the nearest limit."""

from __future__ import annotations

import subprocess
import sys

import pytest

from torsh_distributed import events
from torsh_distributed.launch.worker.recording.memory_samples import MemorySamples
from torsh_distributed.observe.metrics.host_memory import host_memory


def test_steps_bring_memory_no_more_often_than_asked() -> None:
    seen: list[events.Event] = []
    samples, end = MemorySamples(interval_s=1000), events.subscribe(seen.append, events.MemoryEvent)
    try:
        for step in range(3):
            events.emit(events.StepEvent(step=step, duration_s=0.1))
    finally:
        samples.close()
        end()
    (event,) = seen
    assert isinstance(event, events.MemoryEvent)
    assert event.device == "host"
    assert event.limit_bytes is not None
    assert 1 << 20 < event.allocated_bytes == event.peak_bytes < event.limit_bytes


def test_memory_that_is_taken_shows() -> None:
    before = host_memory().used_bytes
    taken = bytearray(b"x" * (64 << 20))
    assert host_memory().used_bytes - before == pytest.approx(len(taken), rel=0.2)


def test_a_limit_of_the_process_is_the_nearest() -> None:
    code = (
        "import resource\n"
        "from torsh_distributed.observe.metrics.host_memory import host_memory\n"
        "used = int(open('/proc/self/statm').read().split()[5]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (used + (50 << 20), resource.RLIM_INFINITY))\n"
        "found = host_memory()\n"
        "assert found.limit_bytes == used + (50 << 20), found\n"
        "assert abs(found.used_bytes - used) < 8 << 20, found\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
