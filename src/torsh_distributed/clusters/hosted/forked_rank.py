"""Ranks of scripts that are forked from one process of their node, so that torch is imported once instead of by each.

The first host of a job on a node starts that process (`launch.worker.spare`); the others find it by a socket whose
name follows from the job's secret and from what must be equal to share an interpreter. The name is in the abstract
namespace, so that it goes with the process. Where there is none to be had, the rank gets an interpreter of its own.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from torsh_distributed import known_variables
from torsh_distributed.comm.trust.job_secret import peer_uid
from torsh_distributed.launch.worker import spare

_WARM_S = 120.0
_FORK_S = 60.0
_END_S = 5.0
_LOOK_S = 0.01
_MAX_LOOKS = 200
_READ_WHEN_LOADED = (
    "PYTHON",
    "LD_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "TORCH",
    "PYTORCH",
    "MALLOC_",
    "LC_",
    "LANG",
)
"""Beginnings of variables that interpreters and libraries read once: ranks that differ in them share nothing."""
_ACT_ON_IMPORT = ("TORSH_FAULTS", "TORSH_FAULT_LOG", "TORSH_EVENTS_DIR", "TORSH_METRICS", "TORSH_RUN_AS")
"""What `sitecustomize` does for a rank when its script imports torch, which is too late in a forked one."""


def can_fork(env: Mapping[str, str]) -> bool:
    """Whether a rank with these variables gains by it, and behaves as one with an interpreter of its own."""
    has_peers = known_variables.whole_number("LOCAL_WORLD_SIZE", env) > 1
    return has_peers and not any(env.get(name) for name in _ACT_ON_IMPORT)


class ForkedRank:
    """A rank that was forked: what is used of a `subprocess.Popen`."""

    def __init__(self, pid: int, stdout: IO[bytes], host: socket.socket) -> None:
        self.pid = pid
        self.stdout = stdout
        self._host = host
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code; raises TimeoutExpired."""
        if self._code is None:
            self._host.settimeout(timeout)
            try:
                told = self._host.recv(spare.MAX_MESSAGE_BYTES)
            except TimeoutError:
                raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout or 0) from None
            except OSError:
                told = b""
            # Without a word its parent was killed; the session is ended by who started the rank.
            self._code = int(json.loads(told)["code"]) if told else -signal.SIGKILL
            self._host.close()
        return self._code


class RankForker:
    """One host's way to the process that its node's ranks are forked from. `cancel` may come from another thread."""

    def __init__(self, secret: str, env: Mapping[str, str], *, own_variables: Sequence[str]) -> None:
        """`own_variables` are the job's for this rank: the process that all are forked from has none of them, except
        for what is read when libraries are loaded.
        """
        self._env = {
            name: value
            for name, value in env.items()
            if name not in own_variables or name.startswith(_READ_WHEN_LOADED)
        }
        self._address = f"\0torsh-{_digest(secret, self._env)}"
        self._process: subprocess.Popen[bytes] | None = None
        self._hold: socket.socket | None = None
        self._host: socket.socket | None = None
        self._is_cancelled = threading.Event()

    def fork(self, argv: Sequence[str], env: Mapping[str, str], *, cwd: str, line: int) -> ForkedRank | None:
        """The rank, forked once torch is there; None if that is not to be had. Raises OSError if it gets lost then."""
        host = self._host = self._connect()
        if host is None:
            return None
        host.settimeout(_WARM_S)
        try:
            is_warm = not self._is_cancelled.is_set() and bool(host.recv(spare.MAX_MESSAGE_BYTES))
        except OSError:
            is_warm = False
        if not is_warm or self._is_cancelled.is_set():
            host.close()
            return None
        host.settimeout(_FORK_S)
        reading, writing = os.pipe()
        stdout = os.fdopen(reading, "rb")
        try:
            pid = spare.order_worker(host, argv, env, (writing, writing, line), cwd=cwd, is_adopted=False)
            return ForkedRank(pid, stdout, host)
        except BaseException:
            stdout.close()
            host.close()
            raise
        finally:
            os.close(writing)

    def _connect(self) -> socket.socket | None:
        """A connection to the node's process, which is started if nobody has; None if it is another user's."""
        pause = threading.Event()
        for _ in range(_MAX_LOOKS):
            host = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                host.connect(self._address)
            except ConnectionRefusedError:
                host.close()
                if not self._start():
                    pause.wait(_LOOK_S)  # another host has the name, and will listen in a moment
                continue
            if peer_uid(host) == os.geteuid():
                return host
            host.close()
            return None
        return None

    def _start(self) -> bool:
        """Start the process; false if another host is about to."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            try:
                listener.bind(self._address)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return False
                raise
            listener.listen(1024)
            self._process, self._hold = spare.start_spare(self._env, listener=listener)
        return True

    def cancel(self) -> None:
        """Give up a wait for the process; a rank that was forked is not touched."""
        self._is_cancelled.set()
        host = self._host
        if host is not None:
            try:
                host.shutdown(socket.SHUT_RD)
            except OSError:
                return  # it is closed already

    def close(self) -> None:
        """End the process if it was started here; its ranks go on."""
        if self._hold is not None:
            self._hold.close()
            self._hold = None
        if self._process is not None:
            if self._is_cancelled.is_set():
                self._process.kill()  # while it imports, it does not look
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(_END_S)
            self._process = None


def _digest(secret: str, env: Mapping[str, str]) -> str:
    """Equal for hosts whose ranks can share an interpreter."""
    spaces = [str(Path(f"/proc/self/ns/{name}").stat().st_ino) for name in ("mnt", "pid", "net", "ipc")]
    loaded = sorted(f"{name}={value}" for name, value in env.items() if name.startswith(_READ_WHEN_LOADED))
    return hashlib.sha256("\0".join([secret, sys.executable, *spaces, *loaded]).encode()).hexdigest()[:40]
