"""What the doctor says about a job: one paragraph, and a line for each rank. Pure; `inquiry` collects what it needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torsh_distributed.launch.causes.likely_cause import LikelyCause, likely_cause
from torsh_distributed.launch.causes.waits import WaitFinding, explain_waits, ranks_text
from torsh_distributed.launch.worker.rank_status import RankStatus, SeenOperation

_SHORTEST_S = 1.0
_SHOWN_OPERATIONS = 4
_LONG_EXIT_S = 5.0
"""A process that takes longer to end after its script has, and still runs, is told about."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Whether a job is stuck, who is missing, where and why."""

    is_stuck: bool
    text: str
    """One paragraph."""
    rank: int | None = None
    """The rank at fault."""
    waiting: tuple[int, ...] = ()
    operation: str | None = None
    sequence: int | None = None
    num_bytes: int | None = None
    call_site: str | None = None
    cause: LikelyCause | None = None
    stack: tuple[str, ...] = ()
    """Where the rank at fault is."""
    ranks: tuple[str, ...] = ()
    """A line for each rank."""

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return dataclasses.asdict(self)

    @property
    def lines(self) -> list[str]:
        """The whole report for a terminal."""
        shown = [self.text]
        if self.stack:
            shown += [f"rank {self.rank} is at:", *(f"  {line}" for line in self.stack)]
        return [*shown, *self.ranks]


def diagnose(
    statuses: Mapping[int, RankStatus],
    finished: set[int],
    *,
    num_ranks: int,
    leaving: Mapping[int, float] | None = None,
) -> Diagnosis:
    """What can be said now; `statuses` has what each rank answered, `finished` the ranks that ended normally.

    `leaving`: those of them whose process still runs, and for how many seconds.
    """
    stays = {rank: since_s for rank, since_s in (leaving or {}).items() if since_s >= _LONG_EXIT_S}
    finished = finished - stays.keys()
    lines = tuple(_rank_line(rank, statuses.get(rank), finished) for rank in range(num_ranks))
    found = explain_waits(statuses, finished)
    silent = [rank for rank, status in sorted(statuses.items()) if status.silence is not None and rank not in finished]
    if found is None or (found.kind in ("late", "together") and _age_s(found, statuses) < _SHORTEST_S):
        if stays:
            return _hangs_at_exit(stays, statuses, lines)
        if not silent:
            return Diagnosis(is_stuck=False, text=_healthy(statuses, finished, num_ranks), ranks=lines)
        status = statuses[silent[0]]
        found = WaitFinding(
            kind="late", rank=status.rank, waiting=(), call=None, text=status.silence or "", stack=status.stack
        )
    cause = likely_cause(found, statuses, finished)
    call = found.call
    return Diagnosis(
        is_stuck=found.kind != "together" or cause.kind == "link",
        text=_paragraph(found, cause, statuses, finished),
        rank=found.rank,
        waiting=found.waiting,
        operation=call.op if call is not None else None,
        sequence=call.sequence if call is not None else None,
        num_bytes=call.num_bytes if call is not None and (call.num_bytes or 0) >= 0 else None,
        call_site=call.at if call is not None else None,
        cause=cause,
        stack=found.stack or _stack_of(found.rank, statuses),
        ranks=lines,
    )


def _hangs_at_exit(stays: Mapping[int, float], statuses: Mapping[int, RankStatus], lines: tuple[str, ...]) -> Diagnosis:
    rank = min(stays)
    status = statuses[rank]
    text = (
        f"Rank {rank} came to the end of its script {stays[rank]:.0f} s ago, but its process does not end:"
        f" {status.whereabouts}. Likely cause: Python waits for threads that are not daemons and for atexit"
        " handlers. What to do: end or join them at the end of the script, or make the threads daemons."
    )
    return Diagnosis(is_stuck=True, text=text, rank=rank, stack=status.stack, ranks=lines)


def _stack_of(rank: int | None, statuses: Mapping[int, RankStatus]) -> tuple[str, ...]:
    status = statuses.get(rank) if rank is not None else None
    return status.stack if status is not None else ()


def _age_s(found: WaitFinding, statuses: Mapping[int, RankStatus]) -> float:
    ages = [status.waiting.age_s for rank in found.waiting if (status := statuses.get(rank)) and status.waiting]
    return max(ages, default=0.0)


def _paragraph(found: WaitFinding, cause: LikelyCause, statuses: Mapping[int, RankStatus], finished: set[int]) -> str:
    parts = []
    if found.kind == "late" and found.call is not None:
        call, one = found.call, len(found.waiting) == 1
        # gloo's calls without a tensor come with -1.
        facts = [f"{call.num_bytes} bytes"] if call.num_bytes and call.num_bytes > 0 else []
        facts += [call.at] if call.at else []
        inside = f" ({', '.join(facts)})" if facts else ""
        who, have = _capital(ranks_text(found.waiting)), "has" if one else "have"
        parts.append(
            f"{who} {have} waited {_age_s(found, statuses):.1f} s in "
            f"{call.shown}{inside} for rank {found.rank}{_whereabouts(found.rank, statuses, finished)}."
        )
    elif found.kind == "late":
        parts.append(f"Rank {found.rank} does not answer, and nobody waits for it yet.")
    else:
        parts.append(f"{_capital(found.text)}.")
    parts.append(f"Likely cause: {cause.text}. What to do: {cause.advice}.")
    return " ".join(parts)


def _whereabouts(rank: int | None, statuses: Mapping[int, RankStatus], finished: set[int]) -> str:
    status = statuses.get(rank) if rank is not None else None
    if rank in finished:
        return ", which ended normally"
    if status is None:
        return ""
    last = _latest(status)
    told = f"; its last operation is {_shown(last)}" if last is not None else ""
    if status.silence is not None:
        return f": {status.silence}{told}"
    place = next((line.strip() for line in reversed(status.stack) if line.lstrip().startswith("File ")), None)
    return f", which is at {_place(place)}{told}" if place is not None else told


def _place(line: str) -> str:
    """`train.py:12 in step`, from Python's spelling of a frame."""
    file, _, rest = line.removeprefix('File "').partition('", line ')
    number, _, function = rest.partition(", in ")
    return f"{file}:{number}" + (f" in {function}" if function and function != "<module>" else "")


def _latest(status: RankStatus) -> SeenOperation | None:
    every = [one for history in status.groups.values() for one in history.operations[-1:]]
    return max(every, key=lambda one: one.sequence, default=None)


def _shown(one: SeenOperation) -> str:
    size = f" of {one.num_bytes} bytes" if one.num_bytes > 0 else ""
    return f"{one.op} #{one.sequence}{size}" + (f" at {one.at}" if one.at else "")


def _healthy(statuses: Mapping[int, RankStatus], finished: set[int], num_ranks: int) -> str:
    if not statuses and not finished:
        return "No rank has answered."
    unheard = sorted(set(range(num_ranks)) - set(statuses) - finished)
    steps = {status.step for status in statuses.values() if status.step is not None}
    at = f" The ranks are at step {min(steps)}" + (f" to {max(steps)}." if len(steps) > 1 else ".") if steps else ""
    quiet = f" {_capital(ranks_text(unheard))} did not answer." if unheard else ""
    return f"Nothing is stuck: no rank has waited for another for more than {_SHORTEST_S:g} s.{at}{quiet}"


def _rank_line(rank: int, status: RankStatus | None, finished: set[int]) -> str:
    if rank in finished:
        return f"rank {rank}: ended normally"
    if status is None:
        return f"rank {rank}: no answer"
    parts = [] if status.step is None else [f"step {status.step}"]
    if status.silence is not None:
        parts.append(status.silence)
    elif status.waiting is not None:
        call = status.waiting
        parts.append(f"waits {call.age_s:.1f} s in {call.shown}" + (f" ({call.at})" if call.at else ""))
    else:
        place = next((line.strip() for line in reversed(status.stack) if line.lstrip().startswith("File ")), None)
        parts.append(f"at {_place(place)}" if place is not None else "has not begun its script")
    if status.native is not None:
        parts.append(status.native)
    if status.handling is not None:
        parts.append(f"handles {status.handling}")
    for group, history in status.groups.items():
        latest = ", ".join(f"{one.op} #{one.sequence}" for one in history.operations[-_SHOWN_OPERATIONS:])
        parts.append(f"last on group {group}: {latest}")
    parts += [f"thread {thread}" for thread in status.threads]
    return f"rank {rank}: " + "; ".join(parts)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
