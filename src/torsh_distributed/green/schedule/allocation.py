"""Workers over time slots, so that a job is done by its deadline with the least CO2.

Greedy by marginals: of all further workers in all slots, the one with the most work for a gram is taken next, until the
work is done. That is the best allocation if each further worker adds no more speed than the one before it.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torsh_distributed.errors import InvalidArgument

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class TimeSlot:
    """A stretch of time with one intensity, in seconds since the epoch."""

    start: float
    end: float
    g_per_kwh: float
    renewable_share: float | None = None
    weight: float | None = None
    """What a kilowatt-hour counts for in the choice of slots; None for its grams."""

    @property
    def hours(self) -> float:
        """Its length."""
        return (self.end - self.start) / _HOUR_S


@dataclass(frozen=True, kw_only=True)
class JobShape:
    """What is to be done, in hours of one worker, and what further workers add."""

    work_h: float
    speeds: Sequence[float] = (1.0,)
    """Speed with 1, 2, … workers, over that of one."""
    busy_w: float = 1000.0
    """Power of a worker that trains."""
    idle_w: float = 0.0
    """Power of each worker that waits, while the job is not done: the machines are held."""
    min_workers: int = 1
    """Fewer do not train: it is these or none."""

    def __post_init__(self) -> None:
        gains = [later - before for before, later in zip((0.0, *self.speeds), self.speeds, strict=False)]
        falls = any(later > before + 1e-9 for before, later in itertools.pairwise(gains))
        is_sound = self.work_h > 0 and bool(self.speeds) and min(gains) > 0 and not falls
        if not is_sound or not 0 <= self.idle_w < self.busy_w or not 1 <= self.min_workers <= len(self.speeds):
            raise InvalidArgument(
                "a job has work, speeds that grow by less and less, idle power below busy power, and workers for them",
                got=f"work {self.work_h} h, speeds {list(self.speeds)}, {self.idle_w} of {self.busy_w} W",
            )

    @property
    def max_workers(self) -> int:
        """The most that it can use."""
        return len(self.speeds)


@dataclass(frozen=True, slots=True)
class SlotWorkers:
    """A slot with the workers that train in its first `share`."""

    slot: TimeSlot
    workers: int
    share: float = 1.0


@dataclass(frozen=True, kw_only=True)
class WorkerSchedule:
    """A plan: who trains when, what that emits, and when it is done."""

    slots: tuple[SlotWorkers, ...]
    grams: float
    kwh: float
    done_at: float | None
    """None if the work does not fit."""

    @property
    def windows(self) -> list[tuple[float, float, int]]:
        """(start, end, workers) of neighbouring slots with the same workers, without those in which nobody trains."""
        found: list[tuple[float, float, int]] = []
        for one in self.slots:
            if not one.workers:
                continue
            end = one.slot.start + one.share * (one.slot.end - one.slot.start)
            if found and found[-1][1] == one.slot.start and found[-1][2] == one.workers:
                found[-1] = (found[-1][0], end, one.workers)
            else:
                found.append((one.slot.start, end, one.workers))
        return found


def allocate(job: JobShape, slots: Sequence[TimeSlot]) -> WorkerSchedule:
    """The workers of each slot with the least CO2; `done_at` is None if all of them do not suffice."""
    chosen = [0] * len(slots)
    shares = [1.0] * len(slots)
    left_h = job.work_h
    queue: list[tuple[float, int, int]] = []

    def offer(index: int, workers: int) -> None:
        slot = slots[index]
        weight = slot.g_per_kwh if slot.weight is None else slot.weight
        added = workers if workers == job.min_workers else 1  # the first ones come together
        grams = added * (job.busy_w - job.idle_w) / 1e3 * max(weight, 1e-9)
        heapq.heappush(queue, (grams / _gain(job, workers), index, workers))

    for index in range(len(slots)):
        offer(index, job.min_workers)
    while queue and left_h > 1e-9:
        _, index, workers = heapq.heappop(queue)
        chosen[index] = workers
        left_h -= _gain(job, workers) * slots[index].hours
        if left_h > 1e-9 and workers < job.max_workers:
            offer(index, workers + 1)
    if left_h < 0:
        # The one that was taken last is needed for a part of its slot.
        over_h = -left_h
        if chosen[index] == job.min_workers:
            shares[index] = 1.0 - over_h / (_gain(job, job.min_workers) * slots[index].hours)
    return _weighed(job, slots, chosen, shares, is_done=left_h <= 1e-9)


def run_now(job: JobShape, slots: Sequence[TimeSlot]) -> WorkerSchedule:
    """The same job from the first slot on, with all workers, until it is done."""
    chosen, shares, left_h = [0] * len(slots), [1.0] * len(slots), job.work_h
    for index, slot in enumerate(slots):
        if left_h <= 1e-9:
            break
        chosen[index] = job.max_workers
        done_h = job.speeds[-1] * slot.hours
        shares[index] = min(1.0, left_h / done_h)
        left_h -= done_h
    return _weighed(job, slots, chosen, shares, is_done=left_h <= 1e-9)


def _gain(job: JobShape, workers: int) -> float:
    """The speed that the last of them adds; with the fewest that train, that of all."""
    return job.speeds[workers - 1] - (job.speeds[workers - 2] if workers > job.min_workers else 0.0)


def _weighed(
    job: JobShape, slots: Sequence[TimeSlot], chosen: Sequence[int], shares: Sequence[float], *, is_done: bool
) -> WorkerSchedule:
    """Add up: workers that train, and those that wait until the job is done."""
    last = max((index for index, workers in enumerate(chosen) if workers), default=-1)
    grams = kwh = 0.0
    rows = []
    for index, (slot, workers, share) in enumerate(zip(slots, chosen, shares, strict=True)):
        rows.append(SlotWorkers(slot, workers, share))
        if index > last:
            continue
        held = share if index == last else 1.0
        busy_kwh = workers * share * slot.hours * job.busy_w / 1e3
        idle_kwh = (job.max_workers * held - workers * share) * slot.hours * job.idle_w / 1e3
        kwh += busy_kwh + idle_kwh
        grams += (busy_kwh + idle_kwh) * slot.g_per_kwh
    done_at = None
    if is_done and last >= 0:
        done_at = slots[last].start + shares[last] * (slots[last].end - slots[last].start)
    return WorkerSchedule(slots=tuple(rows), grams=grams, kwh=kwh, done_at=done_at)
