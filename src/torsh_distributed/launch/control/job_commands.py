"""How `torsh doctor` and `torsh scale` reach a running launcher: a Unix socket named by its pid, for this user alone.

The name is abstract: it has no file, so a launcher that is killed leaves nothing behind, and /proc/net/unix lists what
runs. It ends in random digits: a stranger who could guess it would take it first, and no job would start. He may still
take names that look like ours, so both ends ask the kernel whose socket the other is before a word is said. One JSON
object in a line asks, one answers, and the connection ends.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from torsh_distributed.comm.trust.job_secret import peer_process
from torsh_distributed.errors import CommunicationError, ConfigurationError, JobNotFound, OperationTimeout
from torsh_distributed.launch.local.loop import Loop

_NAME = "torsh-job-{uid}-{pid}"
_MAX_QUESTION_BYTES = 4096
_MAX_ASKERS = 8
_LIMIT_S = 5.0

Reply = Callable[[dict[str, Any]], None]
JobCommand = Callable[[dict[str, Any], Reply], None]


@dataclass(frozen=True, kw_only=True)
class RunningJob:
    """A job of this user on this machine."""

    pid: int
    """Of its launcher."""
    run_id: str
    num_ranks: int
    node_rank: int
    command: str


class JobCommands:
    """The launcher's end, driven by its loop.

    A command is called with its arguments and a function to reply with, now or later.
    """

    def __init__(self, loop: Loop, job: RunningJob, commands: Mapping[str, JobCommand]) -> None:
        self._loop = loop
        self._commands = {"job": lambda _, reply: reply(asdict(job)), **commands}
        self._askers: set[socket.socket] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        if any(_is_bound_here(name) for name in _names(os.getuid(), job.pid)):
            self._listener.close()
            raise ConfigurationError(
                "this process runs a job already", hint="start each job from a process of its own", pid=job.pid
            )
        self._listener.bind(f"\0{_NAME.format(uid=os.getuid(), pid=job.pid)}-{secrets.token_hex(16)}")
        self._listener.listen(_MAX_ASKERS)
        loop.watch(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            asker, _ = self._listener.accept()
        except OSError:  # it left again
            return
        if len(self._askers) >= _MAX_ASKERS or not _is_allowed(asker):
            asker.close()
            return
        asker.setblocking(False)
        self._askers.add(asker)
        self._loop.watch(asker.fileno(), partial(self._read, asker))
        self._loop.call_later(_LIMIT_S, partial(self._drop, asker))

    def _read(self, asker: socket.socket) -> None:
        try:
            question = json.loads(asker.recv(_MAX_QUESTION_BYTES))
        except (OSError, ValueError, RecursionError):
            self._drop(asker)
            return
        self._loop.unwatch(asker.fileno())
        command = self._commands.get(str(question.pop("ask", None))) if isinstance(question, dict) else None
        if command is None:
            self._drop(asker)
        else:
            command(question, partial(self._reply, asker))

    def _reply(self, asker: socket.socket, answer: dict[str, Any]) -> None:
        if asker not in self._askers:
            return
        asker.settimeout(_LIMIT_S / 10)  # an answer fits the socket's buffer, unless the asker has stopped reading
        try:
            asker.sendall(json.dumps(answer).encode() + b"\n")
        except OSError:
            self._drop(asker)
            return
        self._drop(asker)

    def _drop(self, asker: socket.socket) -> None:
        if asker in self._askers:
            self._askers.remove(asker)
            self._loop.unwatch(asker.fileno())
            asker.close()

    def close(self) -> None:
        """Stop answering."""
        for asker in list(self._askers):
            self._drop(asker)
        self._loop.unwatch(self._listener.fileno())
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_allowed(asker: socket.socket) -> bool:
    """Whether the process at the other end belongs to this user, or to root."""
    return peer_process(asker)[1] in (os.getuid(), 0)


# The side of the user


def running_jobs() -> list[RunningJob]:
    """The jobs of this user that run on this machine now."""
    found = []
    for pid in sorted({int(name.split("-")[3]) for name in _names(os.getuid(), None)}):
        try:
            found.append(RunningJob(**ask_launcher(pid, "job")))
        except (CommunicationError, JobNotFound, TypeError):  # it has just ended, or is of another version
            continue
    return found


def _names(uid: int, pid: int | None) -> list[str]:
    """Bound names that look like those of this user's launchers, or of one of them; anybody may have bound them."""
    wanted = re.compile("@" + _NAME.format(uid=uid, pid=r"\d{1,10}" if pid is None else pid) + "-[0-9a-f]{32}")
    text = Path("/proc/net/unix").read_bytes().decode(errors="replace")
    words = {line.split()[-1] for line in text.splitlines()[1:] if line.strip()}
    return sorted(name for name in words if wanted.fullmatch(name))


def _connected(name: str, uid: int) -> socket.socket | None:
    """A connection to a launcher of that user; None if the name is a stranger's, or nobody accepts at once."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)  # a stranger's socket whose queue is full would be waited for
    try:
        sock.connect("\0" + name.removeprefix("@"))
        if peer_process(sock)[1] == uid:
            return sock
    except OSError:
        pass  # gone, or busy
    sock.close()
    return None


def _is_bound_here(name: str) -> bool:
    sock = _connected(name, os.getuid())
    if sock is None:
        return False
    with sock:
        return peer_process(sock)[0] == os.getpid()


def find_job(name: str) -> RunningJob:
    """The job of that name, or whose launcher has that process id."""
    jobs = running_jobs()
    named = [job for job in jobs if name in (job.run_id, str(job.pid))]
    if len(named) != 1:
        known = ", ".join(f"{job.run_id} (pid {job.pid})" for job in jobs) or "none"
        raise JobNotFound(
            f"no job named {name!r} runs here" if not named else f"several jobs are named {name!r}",
            hint=f"running here: {known}; give the pid, on the machine of node 0",
            job=name,
        )
    return named[0]


def ask_launcher(pid: int, question: str, *, timeout_s: float = _LIMIT_S, **arguments: Any) -> dict[str, Any]:
    """Ask the launcher with that process id; raises if there is none, or if it does not answer."""
    uid = _owner(pid)
    found = next((sock for name in _names(uid, pid) if (sock := _connected(name, uid)) is not None), None)
    if found is None:
        raise JobNotFound(
            f"process {pid} is not a launcher of `torsh run` on this machine",
            hint="`torsh doctor --job all` lists the jobs that run here; give the launcher's pid, not a worker's",
            pid=pid,
        )
    with found as sock:
        sock.settimeout(timeout_s)
        try:
            sock.sendall(json.dumps({"ask": question, **arguments}).encode())
            parts = []
            while part := sock.recv(1 << 16):
                parts.append(part)
        except ConnectionError:
            parts = []
        except TimeoutError:
            raise OperationTimeout(
                f"the launcher with pid {pid} did not answer within {timeout_s:g} s", operation=question, pid=pid
            ) from None
    try:
        answer = json.loads(b"".join(parts))
    except ValueError:
        raise CommunicationError(f"the launcher with pid {pid} ended while it was asked", pid=pid) from None
    assert isinstance(answer, dict), "a launcher answers with an object"
    return answer


def _owner(pid: int) -> int:
    """The user whose launcher it is: root may ask anyone's."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return os.getuid()
