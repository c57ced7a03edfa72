"""Point-to-point messages between some ranks of a group, as algorithms see them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

Transfer = dist.Work | None
"""A message under way; None for an empty one, which is not sent at all."""


class Channel:
    """Some ranks of a group in an order, this one among them, and a tag that no other operation uses at the time.

    Peers are named by their position in the channel. Tensors are flat and contiguous and travel as bytes, so a backend
    need not know their dtype; sizes agree on both sides. Keep a transfer until it is waited for: c10d cancels a message
    whose handle is dropped.
    """

    def __init__(
        self, group: dist.ProcessGroup, members: Sequence[int], *, tag: int, deadline_s: float | None = None
    ) -> None:
        self.group = group
        self.members = tuple(members)
        """Ranks of the group."""
        self._tag = tag
        self._deadline_s = deadline_s
        self.position = self.members.index(group.rank())
        """The index of this rank in the channel."""

    @property
    def size(self) -> int:
        """The number of ranks in the channel."""
        return len(self.members)

    def select(self, positions: Sequence[int]) -> Channel:
        """The channel of some of these ranks, this one among them."""
        members = [self.members[position] for position in positions]
        return Channel(self.group, members, tag=self._tag, deadline_s=self._deadline_s)

    def send(self, tensor: Tensor, to: int) -> Transfer:
        """Start sending; the tensor must not change before the transfer is over."""
        return self.group.send([_bytes(tensor)], self.members[to], self._tag) if tensor.numel() else None

    def receive(self, tensor: Tensor, source: int) -> Transfer:
        """Start receiving into `tensor`. Messages of one peer arrive in the order they were sent."""
        return self.group.recv([_bytes(tensor)], self.members[source], self._tag) if tensor.numel() else None

    def wait(self, *transfers: Transfer) -> None:
        """Return when all are over; c10d raises at the channel's deadline, or at the group's where it has none."""
        for transfer in transfers:
            if transfer is None:
                continue
            if self._deadline_s is None:
                transfer.wait()
            else:
                transfer.wait(timedelta(seconds=max(self._deadline_s - time.monotonic(), 0.001)))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)
