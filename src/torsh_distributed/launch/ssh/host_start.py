"""The launcher of one host, started by ssh: reads its order from stdin and runs the job's part here.

Signals arrive as lines, because ssh without a terminal passes none on. The end of stdin means that the user's process
or the connection is gone; the job then ends here as after SIGTERM.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading

from torsh_distributed.errors import IoError, TorshError
from torsh_distributed.launch.ssh.host_order import HostOrder, read_offer, read_signal

_NOT_STARTED = 78  # EX_CONFIG


def main() -> int:
    """Run the order on stdin; returns the exit code of the job."""
    stdin = os.fdopen(os.dup(0), "rb")
    # Workers must not read the lines that are for this process.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    line = stdin.readline()
    if not line:
        return _NOT_STARTED
    try:
        order = HostOrder.from_line(line)
        _enter(order)
    except (TorshError, ValueError) as error:
        sys.stderr.write(f"torsh run: on {socket.gethostname()}: {error}\n")
        return _NOT_STARTED
    from torsh_distributed.launch.job import launch_job

    offers, to_job = os.pipe()
    threading.Thread(target=_pass_on, args=(stdin, to_job), name="torsh-ssh-stdin", daemon=True).start()
    elastic = order.spec.elastic
    follows = order.spec.is_leader and elastic is not None and elastic.discovery is not None
    try:
        return launch_job(order.spec, offers=offers if follows else None)
    except TorshError as error:
        sys.stderr.write(f"torsh run: on {socket.gethostname()}: {error.code}: {error}\n")
        return 1


def _enter(order: HostOrder) -> None:
    os.environ.update(order.env)
    try:
        os.chdir(order.directory)
    except OSError as error:
        raise IoError(
            f"the job's directory {order.directory} cannot be entered here: {error.strerror}",
            hint="the code must be at the same path on every host: share the directory, copy it, or start from one "
            "that all hosts have",
            host=socket.gethostname(),
        ) from error


def _pass_on(stdin: object, to_job: int) -> None:
    """Runs beside the launcher until the line ends."""
    for line in stdin:  # type: ignore[attr-defined]  # a binary file
        offer = read_offer(line)
        if offer is not None:
            os.write(to_job, json.dumps(offer).encode() + b"\n")
        number = read_signal(line)
        if number is not None:
            os.kill(os.getpid(), number)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
