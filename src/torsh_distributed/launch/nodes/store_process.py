"""The store in which the workers of a job meet, served by a child process of the leader.

Why a process: requests of the workers never wait for the launcher, nor the launcher for them, and the store outlives
every worker. It is our own store, which asks every client for the job's secret; torch's TCPStore, which asks for
nothing, is served only if the user wants it (`--torch-store`). Workers that connect early wait in the backlog.

The child runs this file by path (`python -P`). Over its standard input, a Unix socket that only the launcher has the
other end of, it receives the secret, then the listening sockets of each attempt; end of file ends it. The secret is
therefore in no argument and no variable.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torsh_distributed.comm.trust.job_tls import JobTls

_EXIT_WAIT_S = 5.0
_MAX_MESSAGE_BYTES = 2**16
_SERVE, _SERVE_TORCH = b"+", b"t"


class StoreProcess:
    """The launcher's handle on the child. The loop watches `pidfd`: the job cannot go on if the child ends.

    It watches `reports` too, for lines about connections that were refused.
    """

    def __init__(self, secret: str, *, tls: JobTls | None = None) -> None:
        from torsh_distributed.launch.local.guardian import start_shielded

        files = [] if tls is None else [str(path) for path in (tls.certificate, tls.key, tls.authority) if path]

        self.reports, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # A session of its own: Ctrl-C is for the workers, which may still need the store to end well.
            try:
                self._process = start_shielded([sys.executable, "-P", __file__, *files], stdin=theirs.fileno())
            except OSError as error:
                self.reports.close()
                from torsh_distributed.errors import IoError

                raise IoError(
                    f"the process of the workers' store could not be started: {error.strerror or error}",
                    hint="check the limits of processes and memory (`ulimit -u`, `free`)",
                ) from error
        self.reports.send(secret.encode())
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)

    def serve(self, listeners: Sequence[socket.socket]) -> None:
        """Replace the store by an empty one on these sockets, which the caller keeps; old clients are cut off."""
        self._send(_SERVE, listeners)

    def serve_torch(self, listener: socket.socket) -> None:
        """Replace the store by torch's own. A socket can be served once: torch keeps serving the old store on it."""
        self._send(_SERVE_TORCH, [listener])

    def _send(self, order: bytes, listeners: Sequence[socket.socket]) -> None:
        try:
            socket.send_fds(self.reports, [order], [listener.fileno() for listener in listeners])
        except (BrokenPipeError, ConnectionResetError):
            # It was killed a moment ago; the loop reports it through `pidfd`.
            return

    def take_report(self) -> str:
        """The line that has arrived; empty if there is none, or the child is gone."""
        try:
            return self.reports.recv(_MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT).decode(errors="replace")
        except (BlockingIOError, ConnectionResetError):
            return ""

    def close(self) -> None:
        """End the child; the keys are gone."""
        self.reports.close()
        try:
            self._process.kill()
            self._process.wait(timeout=_EXIT_WAIT_S)
        finally:
            os.close(self.pidfd)


def main() -> None:
    """In the child: serve a new store for each order that arrives, until the launcher is done or gone."""
    from torsh_distributed.comm.store.tcp.store_loop import StoreLoop

    _raise_file_limit()
    control = socket.socket(fileno=0)
    secret = control.recv(_MAX_MESSAGE_BYTES)
    loop = StoreLoop(secret, report=lambda line: _tell(control, line), tls=_tls(sys.argv[1:]))
    torch_stores: list[object] = []

    def obey() -> None:
        try:
            order, fds, _, _ = socket.recv_fds(control, 1, 2)
        except ConnectionResetError:
            # The launcher left with a report unread: its end, as an end of file is.
            loop.stop()
            return
        torch_stores.clear()
        if order == _SERVE:
            loop.serve([socket.socket(fileno=fd) for fd in fds])
        elif order == _SERVE_TORCH:
            loop.serve([])
            torch_stores.append(_torch_store(socket.socket(fileno=fds[0])))
        else:
            loop.stop()

    loop.watch(control.fileno(), obey)
    loop.run()


def _tls(files: list[str]) -> JobTls | None:
    """Certificate, key and authority, whose paths are not secret."""
    if not files:
        return None
    from torsh_distributed.comm.trust.job_tls import JobTls

    certificate, key, *authority = map(Path, files)
    return JobTls(certificate=certificate, key=key, authority=authority[0] if authority else None)


def _tell(control: socket.socket, line: str) -> None:
    try:
        control.send(line.encode()[:_MAX_MESSAGE_BYTES])
    except (BrokenPipeError, ConnectionResetError):
        # The launcher is gone; the loop ends at once.
        return


def _torch_store(listener: socket.socket) -> object:
    """torch's store on the socket; it serves while the object lives."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    address, port = listener.getsockname()[:2]
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=listener.detach(),
    )


def _raise_file_limit() -> None:
    """As many connections as the system allows: a job has a few per rank."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    main()
