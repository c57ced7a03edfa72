"""What a process does below Python, from /proc, without stopping it and without root: state, system call, file, load.

A process that holds Python's lock in native code, or is stopped, cannot answer; the kernel still says where it is. Only
the standard library: the worker's side of the line uses it too.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from dataclasses import dataclass

_STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "waits for a device that does not answer",
    "T": "is stopped",
    "t": "is stopped by a debugger",
    "Z": "has ended",
}
# The calls that a stuck process is found in, by number; the first argument of those in _OF_FILE is a file descriptor.
_CALLS = {
    "x86_64": {
        0: "read", 1: "write", 7: "poll", 23: "select", 35: "nanosleep", 42: "connect", 43: "accept", 44: "sendto",
        45: "recvfrom", 46: "sendmsg", 47: "recvmsg", 61: "wait4", 73: "flock", 74: "fsync", 75: "fdatasync",
        202: "futex", 230: "clock_nanosleep", 232: "epoll_wait", 247: "waitid", 257: "openat", 270: "pselect6",
        271: "ppoll", 281: "epoll_pwait", 17: "pread64", 18: "pwrite64", 19: "readv", 20: "writev",
    },
    "aarch64": {
        63: "read", 64: "write", 65: "readv", 66: "writev", 67: "pread64", 68: "pwrite64", 32: "flock", 56: "openat",
        72: "pselect6", 73: "ppoll", 82: "fsync", 83: "fdatasync", 98: "futex", 101: "nanosleep",
        115: "clock_nanosleep", 22: "epoll_pwait", 95: "waitid", 202: "accept", 203: "connect", 206: "sendto",
        207: "recvfrom", 211: "sendmsg", 212: "recvmsg", 260: "wait4",
    },
}  # fmt: skip
_OF_FILE = frozenset(
    {"read", "write", "readv", "writev", "pread64", "pwrite64", "flock", "fsync", "fdatasync", "connect", "accept"}
    | {"sendto", "recvfrom", "sendmsg", "recvmsg", "epoll_wait", "epoll_pwait"}
)
_IN_WORDS = {
    "futex": "waits for a lock of another thread or process",
    "nanosleep": "sleeps on purpose",
    "clock_nanosleep": "sleeps on purpose",
    "wait4": "waits for a child process",
    "waitid": "waits for a child process",
    "flock": "waits for a file lock",
    "fsync": "waits for the disk",
    "fdatasync": "waits for the disk",
    "openat": "opens a file",
}

_SHORTEST_LOOK_S = 0.1
_OPEN_STATES = ("01", "02")  # established, or connecting
_MANY_RETRANSMISSIONS = 3
NO_ANSWER = "no answer from"
"""How `NativeState.text` names peers behind a dead link."""


@dataclass(frozen=True, kw_only=True)
class NativeState:
    """The main thread of a process, as the kernel sees it."""

    state: str
    """One letter, as in /proc/PID/stat: R, S, D, T, Z."""
    call: str | None = None
    """The system call it is in."""
    target: str | None = None
    """The file, pipe or socket that the call is about."""
    place: str | None = None
    """The kernel function it sleeps in (wchan)."""
    cpu_share: float | None = None
    """CPU time over wall time of the whole process; 1.0 is one busy core."""
    unanswered: tuple[str, ...] = ()
    """Peers that do not acknowledge what was sent to them: their link is dead, or their machine."""

    @property
    def text(self) -> str:
        """`sleeps in read of pipe:[4711]`."""
        if self.state == "S" and self.call in _IN_WORDS:
            words = _IN_WORDS[self.call]
        else:
            words = _STATES.get(self.state, f"is in state {self.state}")
            if self.call is not None and self.state in ("S", "D"):
                words += f" in {self.call}"
        if self.target is not None:
            words += f" of {self.target}"
        elif self.place and self.call is None and self.state in ("S", "D"):
            words += f" in {self.place}"
        if self.cpu_share is not None and self.cpu_share >= 0.2:
            words += f", {self.cpu_share:.0%} CPU"
        if self.unanswered:
            words += f"; {NO_ANSWER} {' and '.join(self.unanswered)}"
        return words


def read_native_state(pid: int, *, since: CpuLook | None = None) -> NativeState | None:
    """The state of a process now; None if it is gone. With an earlier look, its CPU load since then too."""
    stat = _read(f"/proc/{pid}/stat")
    if not stat:
        return None
    call, target = _system_call(pid)
    place = _read(f"/proc/{pid}/wchan").strip()
    return NativeState(
        state=stat.rpartition(")")[2].split()[0],
        call=call,
        target=target,
        place=place if place not in ("", "0") else None,
        cpu_share=None if since is None else since.share_until(look_at_cpu(pid)),
        unanswered=unanswered_peers(pid),
    )


def unanswered_peers(pid: int) -> tuple[str, ...]:
    """The other ends of the process's TCP connections that have not answered to several retransmissions."""
    sockets = _sockets(pid)
    found = set()
    for name in ("tcp", "tcp6"):
        for line in _read(f"/proc/{pid}/net/{name}").splitlines()[1:]:
            fields = line.split()
            if len(fields) < 10 or fields[3] not in _OPEN_STATES or fields[9] not in sockets:
                continue
            # 01: the timer that runs is the one for sending again.
            if fields[5].startswith("01:") and int(fields[6], 16) >= _MANY_RETRANSMISSIONS:
                found.add(_address(fields[2]))
    return tuple(sorted(found))


def _sockets(pid: int) -> set[str]:
    """The inodes of a process's sockets, as /proc writes them."""
    found: set[str] = set()
    try:
        numbers = os.listdir(f"/proc/{pid}/fd")  # noqa: PTH208 - pathlib is slow to import
    except OSError:
        return found
    for number in numbers:
        try:
            link = os.readlink(f"/proc/{pid}/fd/{number}")  # noqa: PTH115
        except OSError:  # closed meanwhile
            continue
        if link.startswith("socket:["):
            found.add(link[8:-1])
    return found


def _address(text: str) -> str:
    """`10.0.0.2:29501`, from /proc's words of four bytes in the machine's order."""
    import ipaddress  # only now: a worker starts quicker without

    words, _, port = text.partition(":")
    raw = b"".join(int(words[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(words), 8))
    address = ipaddress.ip_address(raw)
    mapped = getattr(address, "ipv4_mapped", None)
    shown = mapped if mapped is not None else address
    return f"[{shown}]:{int(port, 16)}" if shown.version == 6 else f"{shown}:{int(port, 16)}"


@dataclass(frozen=True)
class CpuLook:
    """The CPU time of a process at one moment."""

    cpu_s: float
    at_s: float

    def share_until(self, later: CpuLook | None) -> float | None:
        """CPU time over wall time between two looks; None if they are too close to tell."""
        if later is None or later.at_s - self.at_s < _SHORTEST_LOOK_S:
            return None
        return (later.cpu_s - self.cpu_s) / (later.at_s - self.at_s)


def look_at_cpu(pid: int) -> CpuLook | None:
    """The CPU time of a process until now; None if it is gone."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if len(fields) < 13:
        return None
    return CpuLook((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), time.monotonic())


def catches_signal(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, from the mask in /proc/PID/status; False if it cannot be read."""
    for line in _read(f"/proc/{pid}/status").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _system_call(pid: int) -> tuple[str | None, str | None]:
    fields = _read(f"/proc/{pid}/syscall").split()
    if not fields or not fields[0].lstrip("-").isdigit():
        return None, None
    name = _CALLS.get(platform.machine(), {}).get(int(fields[0]))
    if name not in _OF_FILE or len(fields) < 2:
        return name, None
    try:
        return name, os.readlink(f"/proc/{pid}/fd/{int(fields[1], 16)}")  # noqa: PTH115 - pathlib is slow to import
    except (OSError, ValueError):
        return name, None


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - pathlib is slow to import
            return file.read()
    except OSError:  # gone, or not for this user
        return ""
