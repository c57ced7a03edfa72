"""A program that prints the hosts of a job, one `host:slots` or `host` in a line: run once, or all through a job.

An answer that cannot be used raises at the start of a job. Later the last one that could stays in force: a script that
fails for a moment ends no worker.
"""

from __future__ import annotations

import ipaddress
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Self

from torsh_distributed.errors import InvalidArgument, IoError, OperationTimeout, TorshError
from torsh_distributed.launch.spec import DiscoverySpec

LOOPBACK_NAMES = ("localhost", "localhost.localdomain")


def is_this_machine(host: str) -> bool:
    """Whether a name or address means the machine this runs on."""
    own = socket.gethostname()
    if host in LOOPBACK_NAMES or host == own or host.partition(".")[0] == own.partition(".")[0]:
        return True
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return any(_is_own_address(str(address)) for address in found)


def _is_own_address(address: str) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if parsed.is_loopback:
        return True
    with socket.socket(socket.AF_INET6 if parsed.version == 6 else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


_OPTION = "--host-discovery-script"
_HOST = re.compile(r"(?:[A-Za-z0-9_.][A-Za-z0-9_.+-]*@)?(?:[A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.%A-Za-z0-9]+\])")
_MAX_ANSWER_BYTES = 1 << 20
_MAX_SHOWN_CHARS = 200
_KILL_WAIT_S = 5.0


def discovery_command(text: str) -> tuple[str, ...]:
    """The program of `--host-discovery-script` and its arguments; raises if it cannot be run."""
    words = shlex.split(text)
    if not words:
        raise InvalidArgument(f"{_OPTION} needs the program that prints the hosts")
    # As a shell finds it, and beside that a file of this directory.
    found = shutil.which(words[0]) or words[0]
    path = Path(found).absolute()
    if not path.is_file():
        raise IoError(
            f"the host discovery script {words[0]} does not exist", hint="give its path", path=str(path), option=_OPTION
        )
    if not os.access(path, os.X_OK):
        raise IoError(
            f"the host discovery script {words[0]} is not executable", hint=f"chmod +x {words[0]}", path=str(path)
        )
    return str(path), *words[1:]


def parse_answer(text: str, default_slots: int) -> dict[str, int]:
    """Slots by host. Blank lines are skipped, and of a host that is named twice the last line counts."""
    slots: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        word = line.strip()
        if not word:
            continue
        host, separator, count = word.rpartition(":")
        if not separator or word.endswith("]"):
            host, count = word, str(default_slots)
        if not _HOST.fullmatch(host) or not (count.isascii() and count.isdigit()):
            raise InvalidArgument(
                "the host discovery script must print one host:slots or host in a line",
                hint="other words go to its stderr; an IPv6 address goes in brackets: [fd00::1]:4",
                line=number,
                got=word[:_MAX_SHOWN_CHARS],
            )
        slots[host] = int(count)
    return slots


class _Question:
    """One run of the script; `kill` ends it from another thread."""

    def __init__(self, spec: DiscoverySpec) -> None:
        self._spec = spec
        try:
            self._process = subprocess.Popen(
                spec.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            raise IoError(
                f"the host discovery script {spec.command[0]} cannot be run",
                hint="it needs a first line such as #!/bin/sh, and the right to be executed",
                reason=error.strerror or str(error),
            ) from error

    def answer(self) -> dict[str, int]:
        """The hosts; raises if the script fails, takes too long or prints something else."""
        spec, name = self._spec, self._spec.command[0]
        try:
            printed, said = self._process.communicate(timeout=spec.timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.communicate(timeout=_KILL_WAIT_S)
            raise OperationTimeout(
                f"the host discovery script {name} did not end within {spec.timeout_s:g} s",
                hint="let it answer from what it knows",
                operation="host discovery",
            ) from None
        if self._process.returncode:
            raise IoError(
                f"the host discovery script {name} ended with exit code {self._process.returncode}",
                hint="run it by hand",
                said=said.strip()[-_MAX_SHOWN_CHARS:],
            )
        if len(printed) > _MAX_ANSWER_BYTES:
            raise InvalidArgument(
                "the host discovery script printed too much", hint="one host in a line", num_bytes=len(printed)
            )
        return parse_answer(printed, spec.default_slots)

    def kill(self) -> None:
        """End the script, and what it has started."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):  # it has just ended
                os.killpg(self._process.pid, signal.SIGKILL)


def find_hosts(spec: DiscoverySpec) -> dict[str, int]:
    """Run the script once: slots by host."""
    return _Question(spec).answer()


def await_slots(spec: DiscoverySpec, count: int, *, timeout_s: float, say: Callable[[str], None]) -> dict[str, int]:
    """The first answer with at least that many slots; raises at the first bad one, or if none comes in time."""
    deadline_s = time.monotonic() + timeout_s
    offered: int | None = None
    while True:
        hosts = find_hosts(spec)
        total = sum(hosts.values())
        if total >= count:
            return hosts
        if total != offered:
            offered = total
            say(f"waiting for {count} slots: the host discovery script offers {total}")
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise OperationTimeout(
                f"the host discovery script offered {total} slots, and {count} are needed to start",
                hint="lower -np or --min-np, or wait longer with --elastic-timeout (--wait-timeout of torsh run)",
                operation="host discovery",
                timeout_s=timeout_s,
            )
        threading.Event().wait(min(spec.interval_s, left_s))


@dataclass(frozen=True)
class HostReport:
    """What the script says now, or why it says nothing."""

    hosts: dict[str, int] | None = None
    problem: str | None = None


class HostWatch:
    """Asks on a thread while it is open. `fd` is readable when the answer, or the trouble with it, is another one."""

    def __init__(self, spec: DiscoverySpec) -> None:
        self._spec = spec
        self._known: dict[str, int] | None = None
        self._problem: str | None = None
        self._closing = threading.Event()
        self._question: _Question | None = None
        self._reports: SimpleQueue[HostReport] = SimpleQueue()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="torsh-host-discovery", daemon=True)
        self._thread.start()

    def take(self) -> list[HostReport]:
        """What was reported since the last call."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return []
        reports = []
        while not self._reports.empty():
            reports.append(self._reports.get())
        return reports

    def _run(self) -> None:
        while not self._closing.wait(self._spec.interval_s):
            try:
                self._question = _Question(self._spec)
                if self._closing.is_set():  # it was closed before there was anything to end
                    self._question.kill()
                hosts = self._question.answer()
            except TorshError as error:
                self._note(None, str(error))
            else:
                self._note(hosts, None)

    def _note(self, hosts: dict[str, int] | None, problem: str | None) -> None:
        """Report what is new: a problem once, however long it lasts."""
        if self._closing.is_set():
            return
        if hosts is not None and (hosts != self._known or self._problem is not None):
            self._known = hosts
            self._report(HostReport(hosts=hosts))
        elif problem is not None and problem != self._problem:
            self._report(HostReport(problem=problem))
        self._problem = problem

    def _report(self, report: HostReport) -> None:
        self._reports.put(report)
        os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        """Stop asking; a script that runs is ended."""
        self._closing.set()
        if self._question is not None:
            self._question.kill()
        self._thread.join(timeout=self._spec.timeout_s + _KILL_WAIT_S)
        os.close(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
