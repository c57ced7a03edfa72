"""What a node is: the processes that can map each other's memory."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def node_identity() -> str:
    """A name that two processes share if they can map each other's memory and reach each other over loopback.

    Memory is shared through /proc/<pid>/fd, so it takes one kernel, one process namespace and one user. Containers on
    one machine that do not see each other's processes are different nodes, even if they share network and IPC.
    """
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    if not boot_id.exists():
        return socket.gethostname()
    namespaces = [str(Path(f"/proc/self/ns/{kind}").stat().st_ino) for kind in ("pid", "net")]
    return ":".join([boot_id.read_text().strip(), *namespaces, str(os.geteuid())])
