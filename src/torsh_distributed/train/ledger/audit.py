"""What a run has trained on, put together from the reports of all its ranks: the proof that no sample was lost or
doubled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
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
    its rank and for it, counts once.
    """
    batches: dict[tuple[int, int], list[SamplesEvent]] = {}
    for report in reports:
        batches.setdefault((report.epoch, report.batch), []).append(report)
    times: dict[int, Counter[int]] = {}
    torn: dict[int, list[int]] = {}
    for (epoch, batch), found in batches.items():
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
            torn.setdefault(epoch, []).append(batch)
    return [EpochAudit(epoch, counts, tuple(sorted(torn.get(epoch, ())))) for epoch, counts in sorted(times.items())]
