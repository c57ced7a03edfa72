"""A scheduling policy for gloo's threads that keeps them from preempting the thread they wait for."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def patient_threads() -> Iterator[None]:
    """Threads started inside the block do not preempt a running thread when they wake up: SCHED_BATCH, inherited.

    Why: gloo's socket thread tries the lock of a connection and, if it is taken, spins. With fewer cores than threads
    the kernel often runs it when data arrives, in place of the very thread that holds the lock; it then spins until the
    scheduler's next tick, 4 ms away, so a small all-reduce takes one or two ticks, or none, by chance. The figures are
    in decision 14. If another policy is set already, or a sandbox forbids the change, nothing changes: this is about
    speed only.
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
        _log.info("the scheduling policy cannot be changed here, so gloo may be slower: %s", error)
        return False
    return True
