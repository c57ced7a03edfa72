"""Hosts of the lab that can be entered by ssh: a real sshd in each namespace, with keys of its own."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from tests.lab.network import Host

PORT = 2222
_START_TIMEOUT_S = 15.0
_SSHD = "/usr/sbin/sshd"
# Where sshd locks itself up before a client has proved who it is; Debian's service makes it at boot.
_PRIVILEGE_SEPARATION = Path("/run/sshd")


class SshHosts:
    """sshd on some hosts, the client's configuration in `config`, and a way to break it. Ends its servers by pid."""

    def __init__(self, hosts: Sequence[Host], folder: Path) -> None:
        self.hosts = list(hosts)
        self.config = folder / "ssh_config"
        self.known_hosts = folder / "known_hosts"
        self._folder = folder
        self._stack = ExitStack()
        self.servers: list[subprocess.Popen[str]] = []
        _PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
        for name in ("host_key", "user_key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
        (folder / "authorized_keys").write_text((folder / "user_key.pub").read_text())
        key = " ".join((folder / "host_key.pub").read_text().split()[:2])
        self.known_hosts.write_text("".join(f"[{host.name}]:{PORT} {key}\n" for host in self.hosts))
        self.config.write_text(
            f"Host *\n  Port {PORT}\n  User {_user()}\n  IdentityFile {folder}/user_key\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.known_hosts}\n  GlobalKnownHostsFile /dev/null\n  LogLevel ERROR\n"
        )

    def __enter__(self) -> Self:
        try:
            for host in self.hosts:
                self._serve(host)
        except BaseException:
            self.close()
            raise
        return self

    def _serve(self, host: Host) -> None:
        config = self._folder / f"sshd_{host.name}"
        config.write_text(
            f"Port {PORT}\nListenAddress {host.address}\nHostKey {self._folder}/host_key\nPidFile none\nUsePAM no\n"
            f"AuthorizedKeysFile {self._folder}/authorized_keys\nStrictModes no\nPasswordAuthentication no\n"
            "PermitRootLogin prohibit-password\nUseDNS no\nPrintMotd no\nMaxStartups 100\n"
        )
        log = (self._folder / f"sshd_{host.name}.log").open("w")
        self._stack.callback(log.close)
        self.servers.append(host.popen([_SSHD, "-D", "-e", "-f", str(config)], stdout=log, stderr=log))
        _await_listener(host, self.servers[-1], self._folder / f"sshd_{host.name}.log")

    def close(self) -> None:
        for server in self.servers:
            server.terminate()
        for server in self.servers:
            server.wait(timeout=10)
        self._stack.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _await_listener(host: Host, server: subprocess.Popen[str], log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while "Server listening" not in log.read_text():
        assert server.poll() is None, f"sshd on {host.name} ended: {log.read_text()}"
        assert time.monotonic() < deadline, f"sshd on {host.name} does not listen: {log.read_text()}"
        time.sleep(0.01)


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)
