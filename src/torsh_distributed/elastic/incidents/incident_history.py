"""The incidents of a run, from `incidents.jsonl` beside its events: what failed, what was done, how long it took."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torsh_distributed.elastic.incidents.incident import SAME_S, Incident
from torsh_distributed.elastic.incidents.lost_members import losses_in
from torsh_distributed.errors import IoError
from torsh_distributed.events import IncidentEvent
from torsh_distributed.events.jsonl import INCIDENTS
from torsh_distributed.events.recorded import events_in


@dataclass(frozen=True, kw_only=True)
class FailureStatistics:
    """Incidents of one kind, or of all."""

    num_incidents: int
    num_resolved: int
    mean_time_to_failure_s: float | None
    """Time that training ran, over the number of failures."""
    mean_time_to_recovery_s: float | None
    """Of those that were resolved."""


def read_incidents(directory: Path) -> list[Incident]:
    """All incidents of the events in a directory, oldest first: what ranks recovered from, and who was lost."""
    if not directory.is_dir():
        raise IoError("there is no such directory of events", directory=str(directory))
    reported = incidents_of(event for event in events_in(directory / INCIDENTS) if isinstance(event, IncidentEvent))
    return sorted([*reported, *losses_in(directory)], key=lambda one: one.opened_at)


def incidents_of(reports: Iterable[IncidentEvent]) -> list[Incident]:
    """Incidents from their events; reports of several ranks about one failure become one."""
    by_name: dict[str, list[IncidentEvent]] = {}
    for report in reports:
        by_name.setdefault(report.incident, []).append(report)
    found: list[Incident] = []
    for name, events in sorted(by_name.items(), key=lambda one: one[1][0].time):
        first, last = events[0], events[-1]
        one = Incident(
            names=(name,),
            failure=first.failure,
            action=first.action,
            ranks=(first.rank,) if first.rank >= 0 else (),  # a launcher has none
            step=first.step,
            opened_at=first.time,
            status=last.status,
            duration_s=last.duration_s,
            detail=first.detail,
        )
        same = next((other for other in found if _is_same(one, other)), None)
        if same is None:
            found.append(one)
        else:
            found[found.index(same)] = _merged(same, one)
    return found


def failure_statistics(incidents: Sequence[Incident], *, observed_s: float) -> dict[str, FailureStatistics]:
    """Statistics by kind of failure, and over all under `all`. `observed_s` is how long the run was watched."""
    kinds = {kind: [one for one in incidents if one.failure == kind] for kind in sorted({o.failure for o in incidents})}
    return {kind: _statistics(found, observed_s) for kind, found in {**kinds, "all": list(incidents)}.items()}


def observed_seconds(directory: Path) -> float:
    """From the first to the last event of any rank in a directory."""
    first, last = float("inf"), float("-inf")
    for path in directory.glob("*.jsonl"):
        for event in events_in(path):
            first, last = min(first, event.time), max(last, event.time)
    return max(0.0, last - first) if last > first else 0.0


def _statistics(found: Sequence[Incident], observed_s: float) -> FailureStatistics:
    ended = [one.duration_s for one in found if one.status == "resolved" and one.duration_s is not None]
    down_s = sum(one.duration_s or 0.0 for one in found)
    return FailureStatistics(
        num_incidents=len(found),
        num_resolved=sum(one.status == "resolved" for one in found),
        mean_time_to_failure_s=max(0.0, observed_s - down_s) / len(found) if found else None,
        mean_time_to_recovery_s=sum(ended) / len(ended) if ended else None,
    )


def _is_same(one: Incident, other: Incident) -> bool:
    return (
        (one.failure, one.step) == (other.failure, other.step)
        and abs(one.opened_at - other.opened_at) <= SAME_S
        and not set(one.ranks) & set(other.ranks)
    )


def _merged(one: Incident, other: Incident) -> Incident:
    """The first to report opened it; the slowest rank ends it."""
    worst: dict[str, int] = {"resolved": 0, "failed": 1, "open": 2}
    durations = [each.duration_s for each in (one, other) if each.duration_s is not None]
    return Incident(
        names=(*one.names, *other.names),
        failure=one.failure,
        action=one.action,
        ranks=tuple(sorted({*one.ranks, *other.ranks})),
        step=one.step,
        opened_at=min(one.opened_at, other.opened_at),
        status=max(one.status, other.status, key=lambda status: worst.get(status, 2)),
        duration_s=max(durations) if durations else None,
        detail=one.detail,
    )
