"""Move the calling process onto a host of the lab, for ranks that are forked rather than executed.

Does what `ip netns exec` and `unshare --uts` do for `Host.popen`, in the process itself. It must have one thread:
the kernel moves threads, not processes.
"""

from __future__ import annotations

import ctypes
import os
import socket
from dataclasses import dataclass
from pathlib import Path

NETNS_DIR = Path("/run/netns")
HOSTS_DIR = Path("/etc/netns")
"""Where `ip netns exec` finds the files that replace those in /etc inside a namespace."""

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
_MS_BIND, _MS_REC, _MS_SLAVE = 4096, 16384, 1 << 19


@dataclass(frozen=True)
class Place:
    """What a process needs to know about a host to run there."""

    namespace: str
    name: str
    address: str
    interface: str


def _checked(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def enter(place: Place) -> None:
    """Give this process the host's network, host name, /etc/hosts and /sys."""
    libc = ctypes.CDLL(None, use_errno=True)
    with (NETNS_DIR / place.namespace).open() as namespace:
        _checked(libc.setns(namespace.fileno(), _CLONE_NEWNET), f"entering {place.namespace}")
    _checked(libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS), "leaving the machine's mounts and name")
    _checked(libc.mount(b"none", b"/", None, _MS_REC | _MS_SLAVE, None), "detaching mounts")
    _checked(libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None), "mounting /sys")
    hosts = HOSTS_DIR / place.namespace / "hosts"
    _checked(libc.mount(os.fsencode(hosts), b"/etc/hosts", None, _MS_BIND, None), f"mounting {hosts}")
    socket.sethostname(place.name)
