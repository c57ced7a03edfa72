"""The guardian: a small process that ends a job's processes when the launcher dies, even by SIGKILL.

It runs this file under a bare interpreter (`python -I -S`), so this file imports only the standard library, and it
has its own session, out of reach of Ctrl-C and of signals to the launcher's group. The launcher holds the only write
end of its standard input. Lines tell it what to clean up (`session PID`, `directory PATH`) and what to run then
(`command JSON`); `done` means a proper end. End of file without `done` means the launcher is gone. A child between
fork and exec holds a copy of that write end, so no worker can start after the guardian has seen the end of file.

What belongs to a job: every process in the session of one of its workers, and every process whose
environment carries the job's mark, which reaches those that left the session (setsid, double fork).
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

MARK_VARIABLE = "TORSH_JOB_MARKS"
_EXIT_WAIT_S = 2.0
_ROUND_S = 2.0
_TRACKER_WAIT_S = 2.0
_BEGIN_WAIT_S = 1.0
_COMMAND_S = 60.0
_NO_MARK = "-"
"""No job's mark: they are digits."""


def find_members(mark: str, sessions: Iterable[int]) -> dict[int, str]:
    """Running processes of the job by pid, with their command for reports; never this process."""
    known = frozenset(sessions)
    found: dict[int, str] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 (a bare interpreter starts faster without building paths)
        if name.isdigit() and int(name) != os.getpid():
            command = _member_command(int(name), mark, known)
            if command is not None:
                found[int(name)] = command
    return found


def _member_command(pid: int, mark: str, sessions: frozenset[int]) -> str | None:
    """The command of the process if it runs and belongs to the job."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        # The command is in parentheses and may itself hold spaces and parentheses; fields follow the last one.
        head, _, rest = stat.rpartition(b")")
        fields = rest.split()
        state, session = fields[0], int(fields[3])
        if state in (b"Z", b"X"):
            return None
        if session not in sessions and not _has_mark(pid, mark):
            return None
    except (OSError, IndexError, ValueError):
        return None
    return head.partition(b"(")[2].decode(errors="replace")


def _has_mark(pid: int, mark: str) -> bool:
    for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        name, _, value = entry.partition(b"=")
        if name == MARK_VARIABLE.encode():
            return mark.encode() in value.split(b":")
    return False


def kill_members(mark: str, sessions: Iterable[int], *, timeout_s: float) -> tuple[dict[int, str], dict[int, str]]:
    """SIGKILL every process of the job until none is found: (those ended, those that remain at the deadline).

    Repeated, because a process may fork while the list is being read. Python's resource trackers come last: one whose
    users are gone removes the semaphores and segments that they left in shared memory, and ends by itself.
    """
    deadline = time.monotonic() + timeout_s
    trackers_end = None
    known = frozenset(sessions)
    ended: dict[int, str] = {}
    while True:
        members = find_members(mark, known)
        if not members or time.monotonic() >= deadline:
            return ended, members
        chosen = [pid for pid in members if not _is_tracker(pid)]
        if not chosen:
            trackers_end = trackers_end or min(deadline, time.monotonic() + _TRACKER_WAIT_S)
            _await_end(members, trackers_end)
            chosen = list(members) if time.monotonic() >= trackers_end else []
        for pid in _kill_all(chosen, mark, known, deadline):
            ended[pid] = members[pid]


def kill_session(session: int) -> None:
    """SIGKILL every process of a worker's session but resource trackers, which `kill_members` waits for."""
    for pid in find_members(_NO_MARK, [session]):
        if not _is_tracker(pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:  # ended just now, or another user's
                continue


def _is_tracker(pid: int) -> bool:
    """Whether it is the process in which Python keeps the names of what a program shares.

    One that has just begun a program has no arguments for a moment, on a busy machine for milliseconds: it is asked
    again. One that is ending has none either, and no program.
    """
    process = Path(f"/proc/{pid}")
    deadline = time.monotonic() + _BEGIN_WAIT_S
    try:
        while not (command := (process / "cmdline").read_bytes()) and time.monotonic() < deadline:
            (process / "exe").readlink()
            time.sleep(0.001)
    except OSError:
        return False
    return b"from multiprocessing.resource_tracker import main" in command


def _await_end(pids: Iterable[int], deadline: float) -> None:
    """Wait until one of the processes has ended, at most until the deadline."""
    pidfds = []
    try:
        for pid in pids:
            pidfds.append(os.pidfd_open(pid))
        select.select(pidfds, [], [], max(0.0, deadline - time.monotonic()))
    except ProcessLookupError:
        return
    finally:
        for pidfd in pidfds:
            os.close(pidfd)


def _kill_all(pids: Iterable[int], mark: str, sessions: frozenset[int], deadline: float) -> set[int]:
    """Kill the processes, wait for them at most until the deadline, and return those that are gone.

    A pidfd pins a process: if its pid was reused since the list was read, the second check shows it.
    """
    waiting: dict[int, int] = {}
    gone: set[int] = set()
    try:
        for pid in pids:
            try:
                pidfd = os.pidfd_open(pid)
                waiting[pidfd] = pid
                if _member_command(pid, mark, sessions) is not None:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            except OSError:
                # Ended just now, or another user's: the next round shows which.
                continue
        poller = select.poll()
        for pidfd in waiting:
            poller.register(pidfd, select.POLLIN)
        round_end = min(deadline, time.monotonic() + _ROUND_S)
        while len(gone) < len(waiting) and (remaining_s := round_end - time.monotonic()) > 0:
            for pidfd, _ in poller.poll(remaining_s * 1000):
                poller.unregister(pidfd)
                gone.add(waiting[pidfd])
    finally:
        for pidfd in waiting:
            os.close(pidfd)
    return gone


def start_shielded(command: list[str], *, stdin: int) -> subprocess.Popen[bytes]:
    """Start a helper of the launcher in a session of its own, with SIGINT blocked in it from the first instruction.

    Why: until it has its session, Ctrl-C reaches it too and ends it; the launcher would then fail for lack of a helper
    instead of ending its job. A SIGINT that comes meanwhile reaches the launcher when the helper is started.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(command, stdin=stdin, stdout=subprocess.DEVNULL, start_new_session=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Guardian:
    """The launcher's handle on its guardian. The loop watches `pidfd` and calls `revive` if it is killed."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._lines: list[str] = []
        self._start()

    def _start(self) -> None:
        theirs, self._pipe = os.pipe()
        try:
            self._process = start_shielded([sys.executable, "-I", "-S", __file__, self._mark], stdin=theirs)
        finally:
            os.close(theirs)
        self.pidfd = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        """The guardian's current process id."""
        return self._process.pid

    def watch_session(self, session: int) -> None:
        """Add a worker, by the session it leads."""
        self._tell(f"session {session}")

    def remove_directory(self, path: Path) -> None:
        """Add a directory to remove if the launcher cannot."""
        self._tell(f"directory {path}")

    def run_after(self, command: list[str]) -> None:
        """Add a command to run if the launcher is gone, once the job's processes are."""
        self._tell(f"command {json.dumps(command)}")

    def _tell(self, line: str) -> None:
        self._lines.append(line)
        self._write(line)

    def _write(self, line: str) -> None:
        try:
            os.write(self._pipe, f"{line}\n".encode())
        except BrokenPipeError:
            # It was killed a moment ago; the next one gets every line again.
            return

    def revive(self) -> None:
        """Start another guardian in place of one that ended."""
        self._collect()
        self._start()
        for line in self._lines:
            self._write(line)

    def _collect(self) -> None:
        os.close(self._pipe)
        os.close(self.pidfd)
        try:
            self._process.wait(timeout=_EXIT_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=_EXIT_WAIT_S)

    def close(self) -> None:
        """End the guardian after a proper end of the job."""
        self._write("done")
        self._collect()


def main() -> None:
    """In the guardian's process: read until the launcher is done or gone; if gone, end what is left of the job."""
    mark = sys.argv[1]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    sessions: list[int] = []
    directories: list[str] = []
    commands: list[list[str]] = []
    for line in sys.stdin:
        word, _, value = line.rstrip("\n").partition(" ")
        if word == "done":
            return
        if word == "session":
            sessions.append(int(value))
        elif word == "directory":
            directories.append(value)
        elif word == "command":
            commands.append(json.loads(value))
    ended, remaining = kill_members(mark, sessions, timeout_s=10.0)
    for command in commands:  # before the directories, which they may read
        subprocess.run(command, stdin=subprocess.DEVNULL, timeout=_COMMAND_S, check=False)
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)
    if ended:
        print(f"torsh run: the launcher vanished; ended {_names(ended)}", file=sys.stderr)
    if remaining:
        print(f"torsh run: could not end {_names(remaining)}", file=sys.stderr)
        sys.exit(1)


def _names(processes: dict[int, str]) -> str:
    return ", ".join(f"{command} (pid {pid})" for pid, command in sorted(processes.items()))


if __name__ == "__main__":
    main()
