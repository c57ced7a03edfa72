"""Which gradients travel together to the rank that owns their parameters, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class OwnedBucket:
    """Parameters of one owner, dtype and device whose gradients travel in one message."""

    owner: int
    """The rank in the group that gets the mean."""
    params: tuple[nn.Parameter, ...]

    @property
    def sizes(self) -> list[int]:
        """Elements of each."""
        return [param.numel() for param in self.params]


def plan_owned_buckets(
    params: Sequence[nn.Parameter], owner_of: Callable[[nn.Parameter], int], max_numel: int
) -> list[OwnedBucket]:
    """Buckets of at most `max_numel` elements, in the order in which backward is expected to complete them.

    The order is the same on all ranks, as it follows the parameters' own, backwards. A larger gradient travels alone;
    0 lets every gradient travel alone.
    """
    filling: dict[tuple[int, torch.dtype, torch.device], list[nn.Parameter]] = {}
    done: list[OwnedBucket] = []
    for param in reversed(params):
        kind = (owner_of(param), param.dtype, param.device)
        inside = filling.setdefault(kind, [])
        if inside and sum(one.numel() for one in inside) + param.numel() > max_numel:
            done.append(OwnedBucket(kind[0], tuple(inside)))
            inside = filling[kind] = []
        inside.append(param)
    done += [OwnedBucket(owner, tuple(inside)) for (owner, _, _), inside in filling.items() if inside]
    return done
