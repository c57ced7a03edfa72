"""What keeps torch's gloo fast and abortable: the policy of its threads, and the connections that can be cut.

The connections a backend made for a group, kept to be cut.
gloo has no abort, but a call blocked on a connection returns with an error when that connection is shut down.
A group's connections are the sockets this process has after the group is made and did not have before. Only
connected ones are ever touched: shutting down a listening socket of gloo ends the process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_SOCKET = re.compile(r"socket:\[(\d+)\]")


@dataclass
class Connections:
    """Connected sockets by file descriptor; the inode reveals a descriptor that was closed and reused."""

    inodes: dict[int, int] = field(default_factory=dict)
    before: dict[int, int] | None = None
    """While the group is being made: the sockets this process had before."""
    except_port: int | None = None

    def collect(self) -> None:
        """Note the connections that were opened since `before`."""
        for fd, inode in _open_sockets().items():
            if (self.before or {}).get(fd) != inode and _is_connected(fd, self.except_port):
                self.inodes[fd] = inode

    def cut(self) -> int:
        """Shut down every connection that is still open; returns how many. Blocked calls on them fail at once.

        May be called from any thread, even two at once: a call released by one abort ends its group with another.
        """
        if self.before is not None:
            self.collect()
        num_cut, inodes = 0, self.inodes
        self.inodes = {}
        for fd, inode in inodes.items():
            if _open_sockets().get(fd) != inode:
                continue
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
                copy.shutdown(socket.SHUT_RDWR)
                num_cut += 1
        return num_cut


@contextlib.contextmanager
def new_connections(*, except_port: int | None = None) -> Iterator[Connections]:
    """Collect the TCP connections opened while the block runs, except those to `except_port` (the store's)."""
    found = Connections(before=_open_sockets(), except_port=except_port)
    yield found
    found.collect()
    found.before = None


def _open_sockets() -> dict[int, int]:
    sockets = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this listing is gone by now
            match = _SOCKET.fullmatch(str(entry.readlink()))
            if match is not None:
                sockets[int(entry.name)] = int(match[1])
    return sockets


def _is_connected(fd: int, except_port: int | None) -> bool:
    try:
        with socket.socket(fileno=os.dup(fd)) as copy:
            if copy.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            ports = (copy.getpeername()[1], copy.getsockname()[1])
            return except_port not in ports
    except OSError:
        return False  # not connected: a listener, or closed in the meantime


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
