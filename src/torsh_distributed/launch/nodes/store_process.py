"""The store in which the workers of a job meet: torch's TCPStore, served by a child process of the leader.

Why a process: the launcher then needs no torch, whose import takes seconds; it starts the workers at once, and the
child imports torch while they do. Why not rank 0: the store must outlive every worker, and torch's own server would
listen on every interface of the node. Workers that connect early wait in the backlog of the listening socket.

The child runs this file by path (`python -P`), so this file imports the standard library, and torch in the child. Over
its standard input, a Unix socket, it receives one listening socket per attempt; end of file ends it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

_EXIT_WAIT_S = 5.0


class StoreProcess:
    """The launcher's handle on the child. The loop watches `pidfd`: the job cannot go on if the child ends."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # A session of its own: Ctrl-C is for the workers, which may still need the store to end well.
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", __file__],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError as error:
                self._control.close()
                from torsh_distributed.errors import IoError

                raise IoError(
                    f"the process of the workers' store could not be started: {error.strerror or error}",
                    hint="check the limits of processes and memory (`ulimit -u`, `free`)",
                ) from error
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)

    def serve(self, listener: socket.socket) -> None:
        """Replace the store by an empty one on `listener`, which the caller keeps. A socket can be served once:

        clients that connect to the same one again could meet the old store.
        """
        try:
            socket.send_fds(self._control, [b"+"], [listener.fileno()])
        except (BrokenPipeError, ConnectionResetError):
            # It was killed a moment ago; the loop reports it through `pidfd`.
            return

    def close(self) -> None:
        """End the child; the keys are gone."""
        self._control.close()
        try:
            self._process.kill()
            self._process.wait(timeout=_EXIT_WAIT_S)
        finally:
            os.close(self.pidfd)


def main() -> None:
    """In the child: serve a new store for every listening socket that arrives, until the launcher is done or gone."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    control = socket.socket(fileno=0)
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        listener = socket.socket(fileno=fds[0])
        address, port = listener.getsockname()[:2]
        store = TCPStore(  # noqa: F841 - serves while it lives, until the next one replaces it
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            master_listen_fd=listener.detach(),
        )


if __name__ == "__main__":
    main()
