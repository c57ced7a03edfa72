"""The end of a process: threads of a scheduler that nobody closed neither hold it up nor bring it down."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import threading, torch
from torsh_distributed.comm.scheduler import CommunicationScheduler

scheduler = CommunicationScheduler(max_concurrent_ops=2)
for index in range(50):
    scheduler.submit("op", lambda: torch.ones(20000).sum(), num_bytes=1, peer=index % 5)
if {is_waited}:
    scheduler.submit("op", lambda: torch.ones(20000).sum(), num_bytes=1, peer=0).wait()
"""


@pytest.mark.parametrize("is_waited", [True, False])
def test_a_process_ends_well_with_tasks_under_way(is_waited: bool) -> None:
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT.format(is_waited=is_waited)], capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")
