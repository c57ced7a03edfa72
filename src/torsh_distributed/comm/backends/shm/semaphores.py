"""POSIX semaphores in shared memory, through the C library; the portable core orders memory with them.

Note on memory order. Python has no fences, and on ARM a plain store may become visible before earlier ones. POSIX lists
`sem_post` and `sem_wait` among the calls that synchronise memory between processes: whatever a process wrote
before a post is visible to the one whose wait took that post. The portable core therefore never looks at shared
data unless it has taken a semaphore that was posted after the data was written.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import time

SEMAPHORE_BYTES = 64
"""Room for one `sem_t`, with a cache line of its own (glibc and musl need 32 bytes)."""


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    for name in ("sem_post", "sem_trywait", "sem_timedwait", "sem_init"):
        if not hasattr(libc, name):  # before glibc 2.34 they lived in libpthread
            return ctypes.CDLL("libpthread.so.0", use_errno=True)
    return libc


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


def initialise(address: int, value: int) -> None:
    """Create a semaphore at `address` for all processes that map the memory; one process calls this first."""
    if _libc().sem_init(ctypes.c_void_p(address), 1, ctypes.c_uint(value)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def post(address: int) -> None:
    """Add one: wakes a waiter, and publishes what this process wrote before."""
    _libc().sem_post(ctypes.c_void_p(address))


def try_take(address: int) -> bool:
    """Take one if there is one; then everything written before its post is visible."""
    return bool(_libc().sem_trywait(ctypes.c_void_p(address)) == 0)


def take(address: int, timeout_s: float) -> bool:
    """Take one, waiting up to `timeout_s`; False if none came in time or a signal arrived."""
    end_s, fraction = divmod(time.time() + timeout_s, 1)
    end = _Timespec(int(end_s), int(fraction * 1e9))
    if _libc().sem_timedwait(ctypes.c_void_p(address), ctypes.byref(end)) == 0:
        return True
    if ctypes.get_errno() not in (errno.ETIMEDOUT, errno.EINTR):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return False


def value(address: int) -> int:
    """The current count: a hint, because it may change at any time."""
    count = ctypes.c_int()
    _libc().sem_getvalue(ctypes.c_void_p(address), ctypes.byref(count))
    return count.value
