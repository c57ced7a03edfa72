"""Operations that this rank has submitted and not passed on yet: small ones gather, so that many become one message.

A script often submits many small operations in a row and then waits. Passing on each at once would cost a message and a
change of threads for each. So small ones stay here until somebody waits for one, a larger one comes, or Horovod's cycle
time is over, whichever is first. A call that waits for its own result is not delayed.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence

import torch.distributed as dist

from torsh_distributed import events
from torsh_distributed.compress.averaging.named_mean import ring_bytes
from torsh_distributed.migrate.horovod.negotiation.request import PendingOp


def report_buckets(ops: Sequence[PendingOp | None], duration_s: float, group: dist.ProcessGroup) -> None:
    """Emit an event for each bucket among the operations of one step."""
    for op in ops:
        if op is None or op.bucket is None or op.error is not None:
            continue
        facts = op.bucket
        wire_bytes = op.wire_bytes
        if wire_bytes is None and facts.codec is not None:
            wire_bytes = ring_bytes(op.request.num_bytes, group)
        events.emit(
            events.BucketEvent(
                step=facts.step,
                index=facts.bucket,
                num_bytes=facts.num_bytes,
                duration_s=duration_s,
                codec=facts.codec,
                wire_bytes=wire_bytes,
            )
        )


_CLOCK_MONOTONIC = 1


class Outbox:
    """Filled by callers, emptied by the engine's thread, which polls `wake_fd` and `alarm_fd`. Its users lock it.

    Whatever is in it will be taken: it is due and the thread looks, or the alarm is set.
    """

    def __init__(self, cycle_s: float) -> None:
        self._ops: list[PendingOp] = []
        self._is_due = False
        self._is_looked_at = False
        """Whether the thread looks here again before it sleeps."""
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._alarm = _Alarm(cycle_s)
        self.alarm_fd = self._alarm.fd
        self._gathers = cycle_s > 0

    def put(self, op: PendingOp, *, may_gather: bool) -> bool:
        """Add an operation; True if `wake` must be called."""
        ops = self._ops
        ops.append(op)
        if not may_gather or not self._gathers:
            return self.hurry()
        if len(ops) == 1 and not self._is_due:
            self._alarm.set()
        return False

    def hurry(self) -> bool:
        """Gather no longer: everything in it is due now; True if `wake` must be called."""
        if self._is_due or not self._ops:
            return False
        self._is_due = True
        return not self._is_looked_at

    def wake(self) -> None:
        """Let the thread look. Without the lock, which it takes first."""
        os.eventfd_write(self.wake_fd, 1)

    def take(self) -> list[PendingOp]:
        """What is due, for the thread."""
        if not self._is_due:
            self._is_looked_at = False
            return []
        taken, self._ops = self._ops, []
        self._is_due, self._is_looked_at = False, True
        self._alarm.clear()
        return taken

    def was_polled(self, fd: int) -> None:
        """Note that one of the descriptors was ready."""
        if fd == self.wake_fd:
            os.eventfd_read(fd)
        else:
            self._alarm.clear()
            self._is_due = bool(self._ops)

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self.wake_fd)
        os.close(self.alarm_fd)


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSetting(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


class _Alarm:
    """A descriptor that becomes readable a while after `set`: a timer of the kernel, which wakes nobody before.

    Through the C library, because `os.timerfd_create` needs Python 3.13; without releasing the GIL, which takes longer.
    """

    def __init__(self, delay_s: float) -> None:
        libc = _libc()
        self.fd = int(libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
        if self.fd < 0:
            error = ctypes.get_errno()
            raise OSError(error, f"timerfd_create: {os.strerror(error)}")
        self._set = libc.timerfd_settime
        seconds, rest = divmod(round(delay_s * 1e9), 10**9)
        self._delay = _TimerSetting(value=_TimeSpec(seconds, rest))
        self._never = _TimerSetting()
        self._is_set = False

    def set(self) -> None:
        self._set(self.fd, 0, ctypes.byref(self._delay), None)
        self._is_set = True

    def clear(self) -> None:
        if self._is_set:
            self._set(self.fd, 0, ctypes.byref(self._never), None)
            self._is_set = False


@functools.cache
def _libc() -> ctypes.PyDLL:
    return ctypes.PyDLL(None, use_errno=True)
