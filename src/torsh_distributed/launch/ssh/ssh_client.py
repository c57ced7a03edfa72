"""The system's ssh client, as jobs use it: no questions, host keys checked, no secret among its arguments."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torsh_distributed.errors import ConfigurationError, FeatureNotAvailable, InvalidArgument

# No blank, no quote, and no dash in front: it becomes an argument of ssh.
_HOST = re.compile(r"(?:[A-Za-z0-9_.][A-Za-z0-9_.+-]*@)?(?:[A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.%A-Za-z0-9]+\])")


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteHost:
    """One host of a job."""

    target: str
    """As ssh takes it: a name of its configuration, `name`, `user@name` or `user@address`."""

    num_workers: int | None = None
    """Workers there; None takes --nproc-per-node."""


def parse_hosts(text: str) -> tuple[RemoteHost, ...]:
    """Hosts of `a:4,user@b:4,[fd00::1]:4`; raises InvalidArgument for anything else, and for a host named twice."""
    hosts = tuple(_parse_host(part.strip()) for part in text.split(","))
    targets = [host.target for host in hosts]
    twice = next((target for target in targets if targets.count(target) > 1), None)
    if twice is not None:
        raise InvalidArgument(
            f"the host {twice!r} is named twice", hint=f"name it once, with all its workers: {twice}:N", hosts=text
        )
    return hosts


def _parse_host(text: str) -> RemoteHost:
    target, separator, count = text.rpartition(":")
    if not separator or (text.endswith("]") and "[" in text):
        target, count = text, ""
    if not _HOST.fullmatch(target) or (separator and target != text and not count.isdigit()) or count == "0":
        raise InvalidArgument(
            "hosts must read NAME:WORKERS with commas between them",
            hint="for example --hosts a:4,b:4; an IPv6 address goes in brackets: [fd00::1]:4",
            host=text,
        )
    return RemoteHost(target=target, num_workers=int(count) if count else None)


def workers_per_host(hosts: tuple[RemoteHost, ...], default: int) -> int:
    """The number of workers on every host; raises FeatureNotAvailable where hosts differ."""
    counts = {host.target: host.num_workers or default for host in hosts}
    if len(set(counts.values())) > 1:
        raise FeatureNotAvailable(
            "all hosts of a job have the same number of workers",
            hint="give every host the same number",
            hosts=",".join(f"{target}:{count}" for target, count in counts.items()),
        )
    return next(iter(counts.values()))


_ASK_TIMEOUT_S = 10.0
FAILED = 255
"""ssh's exit code if it could not connect or the connection broke."""

_OPTIONS = (
    # Ask for nothing: a password or an unknown key ends the attempt with an error that says so.
    "BatchMode=yes",
    # Whatever the configuration says: a host whose key is not known is not entered.
    "StrictHostKeyChecking=yes",
    "ConnectTimeout=10",
    # A connection of its own, which ends with this process.
    "ControlMaster=no",
    "ControlPath=none",
    # A host that no longer answers is given up after two to three seconds.
    "ServerAliveInterval=1",
    "ServerAliveCountMax=2",
    "RequestTTY=no",
    "ForwardX11=no",
    "ForwardAgent=no",
)

_EXPLAINED = {
    "Host key verification failed": "connect once by hand and check the key: ssh {host}",
    "Permission denied": "ssh {host} must work without a password: add your key there (ssh-copy-id {host})",
    "Could not resolve hostname": "check the name, or give it a HostName in ~/.ssh/config",
    "Connection refused": "start sshd there, or name its Port in ~/.ssh/config",
    "Connection timed out": "check that the host is up and that no firewall is in between",
    "No route to host": "check that the host is up and that no firewall is in between",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SshClient:
    """How hosts are entered."""

    config: Path | None = None
    """Configuration file instead of ~/.ssh/config."""

    options: tuple[str, ...] = ()
    """Settings as `ssh -o` takes them, such as Port=2222. They do not change what is checked: ssh takes the first."""

    python: str = sys.executable
    """The interpreter on the hosts; it must have this library."""

    def command(self, host: RemoteHost) -> list[str]:
        """The command line that starts a launcher's process on the host, which reads its order from stdin."""
        remote = f"exec {shlex.quote(self.python)} -m torsh_distributed.launch.ssh.host_start"
        return [self._program(), *self._settings(), "-T", "--", _address(host), remote]

    def host_name(self, host: RemoteHost) -> str:
        """What the host is called on the network: ssh's own configuration may give it another name."""
        done = subprocess.run(
            [self._program(), *self._settings(), "-G", "--", _address(host)],
            capture_output=True,
            text=True,
            timeout=_ASK_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise ConfigurationError(
                f"ssh cannot be used for {host.target}: {done.stderr.strip()}",
                hint="check ~/.ssh/config, or the file given by --ssh-config",
                host=host.target,
            )
        found = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
        return found["hostname"]

    def _program(self) -> str:
        path = shutil.which("ssh")
        if path is None:
            raise FeatureNotAvailable(
                "--ssh needs the ssh client, which is not on the PATH", hint="install OpenSSH (openssh-client)"
            )
        return path

    def _settings(self) -> list[str]:
        file = [] if self.config is None else ["-F", str(self.config)]
        return [*file, *(word for option in (*_OPTIONS, *self.options) for word in ("-o", option))]


def _address(host: RemoteHost) -> str:
    user, at, name = host.target.rpartition("@")
    return user + at + name.strip("[]")


class SshFailure(NamedTuple):
    """Why a connection failed, and what to do about it."""

    said: str
    hint: str
    is_before_entry: bool
    """Whether ssh never got in."""


def explain_failure(host: RemoteHost, last_lines: list[str]) -> SshFailure:
    """What ssh says about a connection that failed."""
    said = [line for line in last_lines if line.strip()]
    for text, hint in _EXPLAINED.items():
        found = next((line for line in said if text in line), None)
        if found is not None:
            return SshFailure(found.strip(), hint.format(host=_address(host)), is_before_entry=True)
    last = said[-1].strip() if said else "the connection broke"
    return SshFailure(last, f"try it by hand: ssh {_address(host)}", is_before_entry=False)
