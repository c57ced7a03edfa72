"""Why a process ended: exit code, signal in words, the stack it left, out of memory if the kernel's count proves it."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import signal
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torsh_distributed.launch.worker.native_state import catches_signal
from torsh_distributed.launch.worker.raised_error import (
    communication_call,
    folded,
    is_start,
    is_transport_text,
    own_line,
)
from torsh_distributed.launch.worker.worker_start import STACK_SIGNAL

_WORDS = {
    signal.SIGKILL: "killed",
    signal.SIGSEGV: "segmentation fault: invalid memory access",
    signal.SIGBUS: "bus error: often shared memory (/dev/shm) that ran out",
    signal.SIGABRT: "aborted: a failed assertion or an uncaught C++ exception",
    signal.SIGILL: "illegal instruction: a binary built for another processor",
    signal.SIGFPE: "arithmetic error",
    signal.SIGTERM: "terminated",
    signal.SIGINT: "interrupted",
    signal.SIGHUP: "hung up",
    signal.SIGPIPE: "wrote to a pipe that nobody reads",
    signal.SIGXCPU: "CPU time limit exceeded",
    signal.SIGXFSZ: "file size limit exceeded",
}

SAVED_EXIT_CODE = 75
"""EX_TEMPFAIL: a worker was told by a signal to end and has saved its state; the same as in `checkpoint`."""


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How a process ended. `code` is as in subprocess: negative for a signal."""

    code: int
    dumped_core: bool = False

    @property
    def is_success(self) -> bool:
        """Whether it exited with code 0."""
        return self.code == 0

    @property
    def shell_code(self) -> int:
        """The exit code a shell would show: 128 + signal for a signal."""
        return self.code if self.code >= 0 else 128 - self.code

    def describe(self) -> str:
        """In words: `exit code 3`, or `signal 11 (SIGSEGV, segmentation fault: …)`."""
        if self.code == SAVED_EXIT_CODE:
            return f"exit code {self.code} (ended by a signal after saving; start the job again to go on)"
        if self.code >= 0:
            return f"exit code {self.code}"
        try:
            number = signal.Signals(-self.code)
        except ValueError:
            return f"signal {-self.code}"
        words = _WORDS.get(number) or (signal.strsignal(number) or "").lower()
        core = ", core dumped" if self.dumped_core else ""
        return f"signal {int(number)} ({number.name}, {words}{core})"


def peek_status(pidfd: int) -> ExitStatus | None:
    """How the child ended, or None while it runs. It stays a zombie, so its pid is not reused."""
    result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if result is None:
        return None
    if result.si_code == os.CLD_EXITED:
        return ExitStatus(result.si_status)
    return ExitStatus(-result.si_status, dumped_core=result.si_code == os.CLD_DUMPED)


_WAITID = {"x86_64": 247, "aarch64": 95}
_RUSAGE_BYTES = 144
_PEAK_OFFSET = 32  # after two times of two words each: ru_maxrss, in KiB


def peak_memory(pidfd: int) -> int | None:
    """The most memory a child that has ended ever held, in bytes; None if the kernel does not tell. It stays a zombie.

    Python's `waitid` leaves out what the kernel's has: the use of resources. `wait4` has it, but reaps. A child
    counts what its parent held when it was forked, so it is never less than that.
    """
    number = _WAITID.get(platform.machine())
    if number is None:
        return None
    usage = ctypes.create_string_buffer(_RUSAGE_BYTES)
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    if ctypes.CDLL(None).syscall(number, int(os.P_PIDFD), pidfd, None, flags, usage) != 0:
        return None
    return int(struct.unpack_from("l", usage, _PEAK_OFFSET)[0]) * 1024 or None


_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_MAX_STACK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class FatalStack:
    """Where a worker was when a signal such as SIGSEGV ended it."""

    lines: tuple[str, ...] = ()
    """Outermost first, library frames folded."""
    where: str | None = None
    """The user's own line."""
    call: str | None = None
    """The communication call it was in."""


def fatal_stack(progress_file: Path) -> FatalStack:
    """What Python's fault handler wrote beside the progress file: of all its threads, the one that was to blame.

    A fault in a thread of C++ has no Python stack of its own; then the main thread's, which is written last.
    """
    return _left_stack(f"{progress_file}.stack")


def ask_for_stack(worker_pid: int, progress_file: Path) -> bool:
    """Make a worker that cannot answer write its stacks; whether it will. `asked_stack` reads them a moment later."""
    if not catches_signal(worker_pid, STACK_SIGNAL):  # it would end the process
        return False
    try:
        os.truncate(f"{progress_file}.threads", 0)
        os.kill(worker_pid, STACK_SIGNAL)
    except OSError:
        return False
    return True


def asked_stack(progress_file: Path) -> FatalStack:
    """What the worker wrote when `ask_for_stack` asked for it."""
    return _left_stack(f"{progress_file}.threads")


def _left_stack(path: str) -> FatalStack:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - a name beside the progress file's
            text = file.read(_MAX_STACK_BYTES).decode(errors="replace")
    except OSError:
        return FatalStack()
    threads = re.split(r"^(?=Current thread|Thread) ?", text, flags=re.MULTILINE)[1:]
    current = next((part for part in threads if part.startswith("Current")), "")
    chosen = current if _FRAME.search(current) else threads[-1] if threads else ""
    found = [(file, int(line), function) for file, line, function in _FRAME.findall(chosen) if not is_start(file)]
    places = found[::-1]
    return FatalStack(lines=tuple(folded(places)), where=own_line(places), call=communication_call(places))


def is_transport_abort(status: ExitStatus | None, last_lines: Sequence[str]) -> bool:
    """Whether a process aborted itself because a peer was gone, as NCCL's watchdog and C++ exceptions of c10d do."""
    if status is None or status.code != -signal.SIGABRT:
        return False
    return any(is_transport_text(line) for line in last_lines)


@dataclass(frozen=True, slots=True)
class OomCounter:
    """The kernel's count of out-of-memory kills: in this process's control group, or on the whole machine."""

    path: Path

    def read(self) -> int | None:
        """Kills so far, or None if the file is gone or has no count."""
        try:
            lines = self.path.read_text().splitlines()
        except OSError:
            return None
        for line in lines:
            name, _, value = line.partition(" ")
            if name == "oom_kill" and value.isdigit():
                return int(value)
        return None


_WHOLE_MACHINE = Path("/proc/vmstat")


def find_oom_counter(
    proc: Path = Path("/proc/self"),
    mounts: Path = Path("/proc/self/mountinfo"),
    whole_machine: Path = _WHOLE_MACHINE,
) -> OomCounter | None:
    """The counter of the control group this process is in, for version 2 or 1; else the machine's; None without any.

    The root group of version 2 has no counter, and only the machine's tells that something was killed for memory.
    """
    found = _find_group_counter(proc, mounts)
    if found is None and OomCounter(whole_machine).read() is not None:
        return OomCounter(whole_machine)
    return found


def _find_group_counter(proc: Path, mounts: Path) -> OomCounter | None:
    try:
        groups = (proc / "cgroup").read_text().splitlines()
        mounted = mounts.read_text().splitlines()
    except OSError:
        return None
    for line in groups:
        number, controllers, path = line.split(":", 2)
        is_v2 = number == "0" and not controllers
        if not is_v2 and "memory" not in controllers.split(","):
            continue
        name = "memory.events" if is_v2 else "memory.oom_control"
        for root, mountpoint in _cgroup_mounts(mounted, is_v2=is_v2):
            counter = OomCounter(_inside(mountpoint, root, path) / name)
            if counter.read() is not None:
                return counter
    return None


def _cgroup_mounts(mounted: list[str], *, is_v2: bool) -> list[tuple[str, Path]]:
    """(root of the mount inside the hierarchy, where it is mounted), from lines of mountinfo."""
    found = []
    for line in mounted:
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        is_wanted = kind[0] == "cgroup2" if is_v2 else kind[0] == "cgroup" and "memory" in kind[2].split(",")
        if is_wanted:
            found.append((fields[3], Path(fields[4])))
    return found


def _inside(mountpoint: Path, root: str, path: str) -> Path:
    """The group's directory; in a container the mount shows only a part of the hierarchy."""
    if root != "/" and (path == root or path.startswith(root + "/")):
        path = path[len(root) :]
    return mountpoint / path.lstrip("/")


@dataclass(frozen=True, slots=True)
class OomEvidence:
    """The count rose while a worker ran."""

    path: str
    before: int
    after: int

    def describe(self) -> str:
        """The proof, in one line."""
        where = f"the whole machine's, {self.path}" if self.path == str(_WHOLE_MACHINE) else self.path
        return f"the kernel's count of out-of-memory kills rose from {self.before} to {self.after} ({where})"


def oom_evidence(counter: OomCounter | None, before: int | None) -> OomEvidence | None:
    """Evidence that a process of this control group was killed for memory since `before` was read."""
    after = counter.read() if counter is not None else None
    if counter is None or before is None or after is None or after <= before:
        return None
    return OomEvidence(str(counter.path), before, after)
