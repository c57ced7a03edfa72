"""What an all-reduce algorithm is, and the measured costs its estimate is computed from."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_distributed.comm.reduce_op import ReduceOp

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


@dataclass(frozen=True)
class MessageCost:
    """What a message between two ranks costs while all ranks talk: α and β, measured."""

    latency_s: float
    """From the start of an exchange of a small message to its end: α."""
    message_s: float
    """Each further small message in the same exchange."""
    byte_s: float
    """Each byte: β."""

    def exchange_s(self, num_bytes: float, num_messages: int = 1) -> float:
        """Messages of `num_bytes` in all, started at once."""
        return self.latency_s + (num_messages - 1) * self.message_s + num_bytes * self.byte_s


@dataclass(frozen=True)
class MeasuredCosts:
    """What is measured once for a group; the same numbers on every rank."""

    num_ranks: int
    flat: MessageCost
    """Between neighbours in the order of ranks: the slowest of them."""
    fold_byte_s: float
    """Each byte that is folded into another."""
    node_sizes: tuple[int, ...] = ()
    """Ranks on each node; empty if unknown."""
    near: MessageCost | None = None
    """Between neighbours of one node, if there are several nodes."""
    far: MessageCost | None = None
    """Between neighbours at one position of every node, if there are several nodes."""


class Algorithm(ABC):
    """One way for an all-reduce to travel."""

    name: ClassVar[str]

    keeps_rank_order: ClassVar[bool] = False
    """Whether every element is folded as ((r0 + r1) + r2) + …: bits then depend on the contributions alone."""

    @abstractmethod
    def all_reduce(self, flat: Tensor, op: ReduceOp, channel: Channel) -> None:
        """Fold `flat` over the ranks of the channel, in place; every rank of it calls this.

        flat: (numel,), contiguous, on the CPU, any numel, the same on all ranks. After a
        failure its values are invalid.
        """

    @abstractmethod
    def estimated_s(self, num_bytes: int, costs: MeasuredCosts) -> float | None:
        """What an all-reduce of `num_bytes` should take at these costs; None if the algorithm does not apply."""
