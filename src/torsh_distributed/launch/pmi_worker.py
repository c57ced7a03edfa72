"""Between `torsh run --mpi` and a worker: connect to the launcher's PMI server, then become the worker.

Run by path under a bare interpreter (`python -I -S`), so this file imports the standard library alone and costs little.
The process stays the same one, so the launcher's reports speak of the worker itself.
"""

from __future__ import annotations

import os
import socket
import sys

ADDRESS_VARIABLE = "TORSH_PMI_ADDRESS"


def main() -> None:
    """Give the command that follows the connection which MPICH looks for in PMI_FD."""
    rank = os.environ["RANK"]
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        link.connect("\0" + os.environ.pop(ADDRESS_VARIABLE))
        link.sendall(f"{os.environ['TORCHELASTIC_RESTART_COUNT']} {rank}\n".encode())
    except OSError as error:
        sys.exit(f"torsh run --mpi: rank {rank} cannot reach the launcher: {error}")
    os.set_inheritable(link.fileno(), True)
    os.environ.update(PMI_FD=str(link.fileno()), PMI_RANK=rank, PMI_SIZE=os.environ["WORLD_SIZE"])
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 - the user's own command


if __name__ == "__main__":
    main()
