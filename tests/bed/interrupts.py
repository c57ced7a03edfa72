"""Ctrl-C in tests, for a run that was started in the background.

There the shell has SIGINT ignored, every process started from it inherits that, and none of our programs heeds a signal
that it was told to ignore: the tests that interrupt one would wait for ever.
"""

from __future__ import annotations

import signal


def heed_interrupts() -> None:
    """Let SIGINT interrupt this process and what it starts from now on."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
