"""A run of the tests in the background, where SIGINT is ignored, still tests Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

CHILD = "import signal, sys; sys.exit(signal.getsignal(signal.SIGINT) is not signal.default_int_handler)"
IN_THE_BACKGROUND = f"""
import signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
before = subprocess.call([sys.executable, "-c", {CHILD!r}])
from tests.bed.interrupts import heed_interrupts
heed_interrupts()
print(before, subprocess.call([sys.executable, "-c", {CHILD!r}]))
"""


@pytest.mark.ranks
def test_what_a_run_in_the_background_starts_can_be_interrupted() -> None:
    done = subprocess.run([sys.executable, "-c", IN_THE_BACKGROUND], capture_output=True, text=True, timeout=60)
    assert done.stdout == "1 0\n", done.stderr


def test_this_run_has_it_in_place() -> None:
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
