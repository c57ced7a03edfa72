"""How many workers each node may have, from what a host discovery script offers and from what failed; pure.

A node on which a worker fails gets no new one for a while, each time longer than the last. Workers that still run
there go on: they hold the state of training.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", int, str)


class Blacklist(Generic[Key]):
    """Nodes or hosts that failed, and until when nothing is started there."""

    def __init__(self, cooldown_s: tuple[float, float] | None) -> None:
        self._cooldown_s = cooldown_s
        self._until_s: dict[Key, float] = {}
        self._num_times: Counter[Key] = Counter()

    def add(self, key: Key, now_s: float) -> float:
        """Something failed there: for how long it is out. A failure while it is out changes nothing."""
        until_s = self._until_s.get(key, 0.0)
        if until_s > now_s:
            return until_s - now_s
        delay_s = math.inf
        if self._cooldown_s is not None:
            least_s, most_s = self._cooldown_s
            # Twice as long each time; the random part keeps hosts that fail together from coming back together.
            delay_s = min(most_s, least_s * (2 ** self._num_times[key] + random.random()))
            self._num_times[key] += 1
        self._until_s[key] = now_s + delay_s
        return delay_s

    def has(self, key: Key, now_s: float) -> bool:
        """Whether it is out now."""
        return self._until_s.get(key, 0.0) > now_s

    def next_end_s(self, now_s: float) -> float | None:
        """When the next one comes back; None if none does."""
        ends = [until_s for until_s in self._until_s.values() if now_s < until_s < math.inf]
        return min(ends, default=None)


class NodeSlots:
    """What is offered on each node."""

    def __init__(self, offered: Mapping[int, int], cooldown_s: tuple[float, float] | None) -> None:
        self.offered = dict(offered)
        """Slots by node rank; a node that is not named has none."""
        self.failed: Blacklist[int] = Blacklist(cooldown_s)

    def usable(self, nodes: Iterable[int], num_running: Mapping[int, int], now_s: float) -> dict[int, int]:
        """Slots of the nodes that are there; on one that is out, those that are in use."""
        found = {}
        for node in nodes:
            offered = self.offered.get(node, 0)
            found[node] = min(offered, num_running.get(node, 0)) if self.failed.has(node, now_s) else offered
        return found


@dataclass(frozen=True)
class SlotChoice:
    """Which workers the slots are for."""

    target: int
    unplaced: tuple[int, ...]
    """Members that have no slot any more."""
    withdrawn: tuple[int, ...]
    """Workers that have not joined yet, and have no slot any more."""


def choose_members(
    usable: Mapping[int, int], node_of: Mapping[int, int], *, running: Sequence[int], coming: Sequence[int], most: int
) -> SlotChoice:
    """The first workers of each node keep its slots, members before those that are coming."""
    target = min(most, sum(usable.values()))
    left, num_left = dict(usable), target
    without: list[int] = []
    for member in (*running, *coming):
        node = node_of[member]
        if left.get(node, 0) > 0 and num_left > 0:
            left[node] -= 1
            num_left -= 1
        else:
            without.append(member)
    return SlotChoice(
        target=target,
        unplaced=tuple(member for member in without if member in running),
        withdrawn=tuple(member for member in without if member in coming),
    )
