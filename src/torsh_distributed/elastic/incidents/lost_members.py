"""Workers and nodes that a run lost, as incidents: from what its launchers recorded beside the ranks' events.

A loss is over when a step has run again: in place the launcher hears of it (`recovered`), after a restart it is the
first step that a rank recorded.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from pathlib import Path

from torsh_distributed.elastic.incidents.incident import SAME_S, Incident
from torsh_distributed.events import IncidentStatus, MembershipEvent, StepEvent
from torsh_distributed.events.recorded import events_in

_ENDS = {"recovered": "go on in place", "restarted": "restart", "ended": "end the job"}
"""What may follow a loss, and the action that it is the sign of."""


@dataclass(frozen=True)
class _Loss:
    event: MembershipEvent
    who: str
    """worker, rank or node, and its number."""


def losses_in(directory: Path) -> list[Incident]:
    """The losses that launchers recorded in a directory of events; those that several report are one."""
    told = [event for path in directory.glob("launcher-*.jsonl") for event in events_in(path)]
    members = sorted((one for one in told if isinstance(one, MembershipEvent)), key=lambda one: one.time)
    lost = [_Loss(one, str(one.detail).partition(": ")[0]) for one in members if one.action == "lost"]
    ends = [one for one in members if one.action in _ENDS]
    steps_at = _times_of_steps(directory) if lost else []
    found: list[Incident] = []
    for index, loss in enumerate(lost):
        if any(_is_same(loss, other) for other in lost[:index]):
            continue
        found.append(_incident(loss, next((one for one in ends if one.time >= loss.event.time), None), steps_at))
    return found


def _is_same(one: _Loss, other: _Loss) -> bool:
    return one.who == other.who and one.event.time - other.event.time <= SAME_S


def _times_of_steps(directory: Path) -> list[float]:
    paths = directory.glob("rank-*.jsonl")
    return sorted(event.time for path in paths for event in events_in(path) if isinstance(event, StepEvent))


def _incident(loss: _Loss, end: MembershipEvent | None, steps_at: list[float]) -> Incident:
    lost_at = loss.event.time
    kind, _, number = loss.who.partition(" ")
    over_at: float | None = None
    status: IncidentStatus = "open"
    if end is not None and end.action == "ended":
        status, over_at = "failed", end.time
    elif end is not None:
        later = bisect.bisect_left(steps_at, end.time)
        over_at = end.time if end.action == "recovered" else steps_at[later] if later < len(steps_at) else None
        status = "open" if over_at is None else "resolved"
    return Incident(
        names=(f"{loss.who} at {lost_at:.3f}",),
        failure="lost_node" if kind == "node" else "lost_worker",
        action="" if end is None else _ENDS[end.action],
        ranks=(int(number),) if kind != "node" and number.isdigit() else (),
        step=None,
        opened_at=lost_at,
        status=status,
        duration_s=None if over_at is None else over_at - lost_at,
        detail=loss.event.detail,
    )
