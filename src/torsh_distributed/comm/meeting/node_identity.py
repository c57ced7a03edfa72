"""What a node is: the processes that can map each other's memory."""

from __future__ import annotations

import base64
import itertools
import json
import os
import socket
import zlib
from collections.abc import Hashable, Sequence
from pathlib import Path


def pack_nodes(nodes: Sequence[Hashable]) -> str:
    """The node of every rank as text. Names become numbers, in the order of the nodes' lowest ranks.

    The steps from rank to rank compress to almost nothing, because launchers place ranks in patterns: node by node, or
    one on each node in turn. Names alone would be 60 bytes for each node.
    """
    numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    places = [numbers[node] for node in nodes]
    steps = [place - previous for previous, place in itertools.pairwise([0, *places])]
    return base64.b85encode(zlib.compress(json.dumps(steps, separators=(",", ":")).encode())).decode()


def unpack_nodes(packed: str) -> tuple[int, ...]:
    """The number of every rank's node."""
    return tuple(itertools.accumulate(json.loads(zlib.decompress(base64.b85decode(packed)))))


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
