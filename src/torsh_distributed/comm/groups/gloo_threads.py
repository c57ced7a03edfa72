"""What keeps torch's gloo from standing in its own way: threads that do not push aside whoever runs."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def patient_threads() -> Iterator[None]:
    """Threads that this one starts inside the block wait for their turn when they wake up: SCHED_BATCH, inherited.

    Why: gloo's thread for sockets tries the lock of a connection and, where it is taken, looks again at once. With
    fewer cores than threads the kernel often lets it in when data arrives, in place of the very thread that holds the
    lock; it then spins until the scheduler's next tick, 4 ms away, and a small all-reduce takes one or two ticks, or
    none, by chance. The figures are in decision 14. Under another policy than the usual one, and where a sandbox
    forbids the change, all stays as it is: this is about speed alone.
    """
    before = os.sched_getscheduler(0)
    if before != os.SCHED_OTHER or not _set_policy(os.SCHED_BATCH):
        yield
        return
    try:
        yield
    finally:
        _set_policy(before)


def _set_policy(policy: int) -> bool:
    try:
        os.sched_setscheduler(0, policy, os.sched_param(0))
    except OSError as error:
        _log.info("the scheduling policy cannot be changed here, gloo may be slower for it: %s", error)
        return False
    return True
