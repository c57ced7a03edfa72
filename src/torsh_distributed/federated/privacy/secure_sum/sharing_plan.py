"""Who shares secrets with whom, and how many it takes to put one together again.

Up to 128 clients, everybody shares with everybody. Beyond, each has neighbours on a ring whose order nobody chooses
(SecAgg+): as few as keep these three probabilities below their bounds.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

_MOST_COMPLETE = 128
_PRIVACY_BITS, _LOSS_BITS = 60, 20


@dataclass(frozen=True, slots=True)
class SharingPlan:
    """The numbers of one round."""

    num_clients: int
    num_neighbours: int
    """Of each client; even, unless everybody shares with everybody."""
    threshold: int
    """Shares that put a secret together. A client and its neighbours hold one each."""
    quorum: int
    """Clients that must have delivered, and agree on who has: two lists cannot both get so many honest signatures."""


@functools.lru_cache(maxsize=64)
def sharing_plan(num_clients: int, corrupt: float, lost: float) -> SharingPlan:
    """For a round in which these shares of the clients are corrupt and may be lost."""
    num_corrupt, num_lost = math.floor(corrupt * num_clients), math.floor(lost * num_clients)
    quorum = (num_clients + num_corrupt) // 2 + 1
    others = num_clients - 1
    if num_clients > _MOST_COMPLETE:
        for neighbours in range(2, others, 2):
            # The ring comes apart only where half of the neighbours in a row are corrupt or lost, at two places.
            run = num_clients * ((num_corrupt + num_lost) / num_clients) ** (neighbours // 2)
            if run > 2 ** (-_PRIVACY_BITS / 2):
                continue
            threshold = _threshold(others, num_corrupt, neighbours)
            if threshold is not None and _tail(others, num_lost, neighbours, neighbours - threshold) < 2**-_LOSS_BITS:
                return SharingPlan(num_clients, neighbours, threshold, quorum)
    return SharingPlan(num_clients, others, quorum, quorum)


def _threshold(population: int, num_corrupt: int, draws: int) -> int | None:
    """The smallest number that the corrupt ones among the neighbours do not reach."""
    for threshold in range(2, draws + 1):
        if _tail(population, num_corrupt, draws, threshold - 1) < 2**-_PRIVACY_BITS:
            return threshold
    return None


@functools.lru_cache(maxsize=1 << 14)
def _tail(population: int, marked: int, draws: int, most: int) -> float:
    """The probability of more than `most` marked ones among `draws` without replacement."""
    ways = sum(
        math.comb(marked, found) * math.comb(population - marked, draws - found)
        for found in range(most + 1, min(marked, draws) + 1)
    )
    return ways / math.comb(population, draws)


def ring_neighbours(ring: list[int], num_neighbours: int) -> dict[int, frozenset[int]]:
    """By member: the nearest on both sides of the ring, or all others."""
    count = len(ring)
    if num_neighbours >= count - 1:
        everybody = frozenset(ring)
        return {member: everybody - {member} for member in ring}
    half = num_neighbours // 2
    return {
        member: frozenset(ring[(place + step) % count] for step in range(-half, half + 1) if step)
        for place, member in enumerate(ring)
    }
