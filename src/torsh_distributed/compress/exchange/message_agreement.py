"""Ranks compare codec and size before they send messages of a kind for the first time.

Damage that one rank finds is raised by all: what each rank found travels at the end of an exchange.
A message can be damaged on its way to one receiver alone. That rank must not raise by itself, because the others would
wait for it in the next collective; and it must not continue, because it has no mean. So every exchange of encoded
messages ends with an all-reduce of eight bytes, the only cost where nothing is damaged.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from torsh_distributed.comm.collectives.moves import all_gather
from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.errors import CompressionError


class DamageReport:
    """What this rank finds wrong with the messages of one exchange; ranks are those of the group.

    Every rank makes one for each exchange, and ends it with `raise_together`.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._sender = 0
        self.error: CompressionError | None = None
        """The first error found here."""

    @contextmanager
    def reading(self, sender: int) -> Iterator[None]:
        """Keep a CompressionError of the block instead of raising it, with the ranks that sent and received."""
        try:
            yield
        except CompressionError as error:
            if self.error is None:
                error.context.update(from_rank=sender, rank=self._group.rank())
                self.error, self._sender = error, sender

    def raise_together(self, device: torch.device) -> None:
        """Raise on every rank if any rank found damage; every rank calls it once, whatever it found.

        A rank that found some raises its own error, the others one that names the receiver and the sender.
        """
        num_ranks = self._group.size()
        code = 0 if self.error is None else 1 + self._group.rank() * num_ranks + self._sender
        found = int(all_reduce(torch.tensor([code], dtype=torch.int64).to(device), "max", group=self._group))
        if self.error is not None:
            raise self.error
        if found:
            receiver, sender = divmod(found - 1, num_ranks)
            raise CompressionError(
                f"rank {receiver} could not decode the message of rank {sender}",
                hint=f"look for a gradient that is not finite on rank {sender}, then at the network and the memory"
                f" of both; rank {receiver} says more",
                rank=receiver,
                from_rank=sender,
            )


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
