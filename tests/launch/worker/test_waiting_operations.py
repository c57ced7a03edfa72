"""Looking at the threads of a process from inside it. What is seen is tested by test_hangs.py, in jobs."""

from __future__ import annotations

import subprocess
import sys

import pytest

DYING_LOCALS = """
import gc, threading
from torsh_distributed.launch.worker.waiting_operations import frames_now, stack_of_main
gc.collect()
for _ in range(50):
    for look in (frames_now, stack_of_main):
        own = threading.local()
        own.itself = own
        del own
        gc.set_threshold(1, 1, 1)
        look()
        gc.set_threshold(0)
print(gc.isenabled())
gc.disable()
frames_now()
print(gc.isenabled())
"""


@pytest.mark.ranks
def test_looking_ends_though_garbage_with_a_thread_local_is_about_to_be_collected() -> None:
    """Python's own functions hang the whole process there, so its end was never told."""
    done = subprocess.run([sys.executable, "-c", DYING_LOCALS], capture_output=True, text=True, timeout=60)
    assert (done.stdout.split(), done.stderr) == (["True", "False"], "")
