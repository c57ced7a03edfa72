"""Which rank holds which expert: a table, and a better one from measured loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torsh_distributed.errors import ConfigurationError


@dataclass(frozen=True)
class Placement:
    """Experts in slots: slot s is place `s % per_rank` on rank `s // per_rank`; every rank has equally many."""

    expert_of_slot: tuple[int, ...]
    num_ranks: int

    @classmethod
    def contiguous(cls, num_experts: int, num_ranks: int) -> Placement:
        """Neighbouring experts on the same rank."""
        if num_experts % num_ranks:
            raise ConfigurationError(
                f"expert.num_experts {num_experts} does not spread evenly over mesh.ep {num_ranks}",
                hint=f"use a multiple of {num_ranks}, or change mesh.ep",
                num_experts=num_experts,
                ep=num_ranks,
            )
        return cls(tuple(range(num_experts)), num_ranks)

    @property
    def per_rank(self) -> int:
        """Number of experts on each rank."""
        return len(self.expert_of_slot) // self.num_ranks

    @property
    def slot_of_expert(self) -> tuple[int, ...]:
        """The inverse table."""
        slots = [0] * len(self.expert_of_slot)
        for slot, expert in enumerate(self.expert_of_slot):
            slots[expert] = slot
        return tuple(slots)

    def owner_of(self, expert: int) -> int:
        """The rank of the group that holds an expert."""
        return self.expert_of_slot.index(expert) // self.per_rank

    def experts_of(self, rank: int) -> tuple[int, ...]:
        """The experts on a rank of the group, by place."""
        return self.expert_of_slot[rank * self.per_rank : (rank + 1) * self.per_rank]

    def rank_loads(self, loads: Sequence[float]) -> list[float]:
        """The load of each rank. loads: by expert."""
        return [sum(loads[expert] for expert in self.experts_of(rank)) for rank in range(self.num_ranks)]

    def balanced(self, loads: Sequence[float]) -> Placement:
        """A placement with a more even load: each expert, heaviest first, goes to the lightest rank with room.

        An expert that stays on its rank keeps its slot; a set of experts goes to the rank that already has most of it.
        """
        sets: list[list[int]] = [[] for _ in range(self.num_ranks)]
        sums = [0.0] * self.num_ranks
        for expert in sorted(range(len(loads)), key=lambda expert: (-loads[expert], expert)):
            open_sets = [number for number in range(self.num_ranks) if len(sets[number]) < self.per_rank]
            lightest = min(open_sets, key=lambda number: (sums[number], number))
            sets[lightest].append(expert)
            sums[lightest] += loads[expert]
        slots: list[int] = []
        left = sets
        for rank in range(self.num_ranks):
            mine = set(self.experts_of(rank))
            chosen = max(left, key=lambda experts: len(mine.intersection(experts)))
            left = [experts for experts in left if experts is not chosen]
            arriving = iter(sorted(set(chosen) - mine))
            slots += [expert if expert in chosen else next(arriving) for expert in self.experts_of(rank)]
        return Placement(tuple(slots), self.num_ranks)


def variation(loads: Sequence[float]) -> float:
    """The coefficient of variation: standard deviation over mean; 0 if there is no load."""
    mean = sum(loads) / len(loads)
    if mean == 0:
        return 0.0
    return float((sum((load - mean) ** 2 for load in loads) / len(loads)) ** 0.5 / mean)
