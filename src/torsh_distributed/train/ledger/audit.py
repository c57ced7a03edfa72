"""What a run has trained on, put together from the reports of all its ranks: the proof that no sample was lost or
doubled."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torsh_distributed.events import SamplesEvent


@dataclass(frozen=True)
class EpochAudit:
    """The samples of one epoch that count: those of updates that were not undone."""

    epoch: int
    times: Counter[int]
    """Sample to how often it was trained on."""
    torn_batches: tuple[int, ...]
    """Batches whose last reports do not add up to the whole batch."""

    def lost(self, expected: Iterable[int]) -> list[int]:
        """Those of `expected` that were not trained on."""
        return [sample for sample in expected if sample not in self.times]

    @property
    def doubled(self) -> list[int]:
        """Samples that were trained on more than once."""
        return [sample for sample, times in self.times.items() if times > 1]


def audit(reports: Iterable[SamplesEvent]) -> list[EpochAudit]:
    """Every epoch, in order. A batch that was done again is reported again: its latest reports count.

    They are those that, from the last one back in time, add up to the whole batch. A share that was reported twice, by
    its rank and for it, counts once. A batch whose samples were done again in batches of another size does not count.
    """
    batches: dict[_BatchKey, list[SamplesEvent]] = {}
    for report in reports:
        batches.setdefault(_key(report), []).append(report)
    times: dict[int, Counter[int]] = {}
    torn: dict[int, list[int]] = {}
    for key in _not_undone(batches):
        found = batches[key]
        epoch = found[0].epoch
        counts, missing = times.setdefault(epoch, Counter()), found[0].total
        seen: set[int] = set()
        for report in sorted(found, key=lambda one: one.time, reverse=True):
            if missing <= 0:
                break
            if seen.issuperset(report.members):
                continue
            seen.update(report.members)
            counts.update(report.ids)
            missing -= len(report.ids)
        if missing != 0:
            torn.setdefault(epoch, []).append(found[0].batch)
    return [EpochAudit(epoch, counts, tuple(sorted(torn.get(epoch, ())))) for epoch, counts in sorted(times.items())]


_BatchKey = tuple[int, int, int]
"""Of a batch: its epoch, and where it begins and ends in it, in samples; in batches where those were not counted."""


def _key(report: SamplesEvent) -> _BatchKey:
    if report.start is None:
        return report.epoch, report.batch, report.batch + 1
    return report.epoch, report.start, report.start + report.total


def _not_undone(batches: Mapping[_BatchKey, Sequence[SamplesEvent]]) -> list[_BatchKey]:
    """The batches that no later one of other bounds overlaps, which was done after theirs had been undone."""
    kept: list[_BatchKey] = []  # none overlaps another, so neighbours are all that a batch can overlap
    for key in sorted(batches, key=lambda one: max(report.time for report in batches[one]), reverse=True):
        epoch, start, stop = key
        place = bisect.bisect(kept, key)
        before, after = kept[place - 1 : place], kept[place : place + 1]
        is_undone = any(one[0] == epoch and start < one[2] and one[1] < stop for one in before + after)
        if not is_undone:
            kept.insert(place, key)
    return kept
