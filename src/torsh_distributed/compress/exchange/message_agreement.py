"""Ranks compare codec and size before they send messages of a kind for the first time."""

from __future__ import annotations

import weakref
import zlib

import torch
import torch.distributed as dist

from torsh_distributed.comm.collectives.moves import all_gather
from torsh_distributed.errors import CompressionError


def signature_of(*facts: object) -> int:
    """A codec and its parameters as 32 bits, equal on every machine."""
    return zlib.crc32(":".join(map(repr, facts)).encode())


class AgreementCache:
    """The codecs and sizes that the ranks of a group have agreed on.

    Why only once for each size: it costs a small collective, and settings do not change by themselves.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[dist.ProcessGroup, set[tuple[int, int]]] = weakref.WeakKeyDictionary()

    def require(
        self, codec: str, signature: int, num_elements: int, *, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        """Raise CompressionError on every rank unless all have this codec and size; every rank calls it alike."""
        own = (signature, num_elements)
        known = self._known.setdefault(group, set())
        if group.size() == 1 or own in known:
            return
        found = [tuple(each.tolist()) for each in all_gather(torch.tensor(own).to(device), group=group)]
        if any(other != own for other in found):
            raise CompressionError(
                "ranks differ in codec or size of a gradient",
                codec=codec,
                num_elements=[other[1] for other in found],
                signatures=[f"{other[0]:08x}" for other in found],
            )
        known.add(own)

    def forget(self) -> None:
        """Compare again next time; every rank does the same."""
        self._known.clear()
