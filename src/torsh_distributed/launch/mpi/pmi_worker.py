"""The first steps of a worker of `torsh run --mpi`: connect to the launcher's PMI server, then exec the command.

Run by path under a bare interpreter (`python -I -S`), so this file imports only the standard library and starts fast.
The process stays the same, so the launcher's reports are about the worker itself.
"""

from __future__ import annotations

import os
import socket
import sys

ADDRESS_VARIABLE = "TORSH_PMI_ADDRESS"


def connect(address: str, *, attempt: int, rank: int, size: int) -> dict[str, str]:
    """A connection to the launcher's server that a child process inherits; returns the variables that MPICH reads."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.connect(f"\0{address}")
    link.sendall(f"{attempt} {rank}\n".encode())
    link.set_inheritable(True)
    return {"PMI_FD": str(link.detach()), "PMI_RANK": str(rank), "PMI_SIZE": str(size)}


def main() -> None:
    """Connect, then exec the command line that follows."""
    attempt, rank, size = (int(os.environ[name]) for name in ("TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE"))
    try:
        os.environ.update(connect(os.environ.pop(ADDRESS_VARIABLE), attempt=attempt, rank=rank, size=size))
    except OSError as error:
        sys.exit(f"torsh run --mpi: rank {rank} cannot reach the launcher: {error}")
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 - the user's own command


if __name__ == "__main__":
    main()
