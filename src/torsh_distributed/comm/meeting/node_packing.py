"""Which ranks share a node, in few bytes: every rank reads it, so they count as often as the world has ranks."""

from __future__ import annotations

import base64
import itertools
import json
import zlib
from collections.abc import Hashable, Sequence


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
