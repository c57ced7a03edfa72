"""What an all-reduce algorithm is, and the measured costs its estimate is computed from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from torsh_distributed.comm.algorithms.channel import Channel
from torsh_distributed.comm.reduce_op import ReduceOp


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
