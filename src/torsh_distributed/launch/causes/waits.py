"""Who waits for whom: read from what every rank says about itself. Pure.

Ranks number their operations on a group alike. So a rank whose latest number is lower is late, two ranks with different
operations under one number have gone different ways, and ranks that wait for each other in turn are in a deadlock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torsh_distributed.launch.worker.rank_status import GroupHistory, RankStatus, SeenOperation, WaitingCall

# Operations whose sizes must be equal on all ranks; those of the others may differ.
_EQUAL_SIZES = frozenset({"all_reduce", "broadcast", "reduce", "all_gather_single", "reduce_scatter_single", "barrier"})
_UNDECIDED = frozenset({"init", "destroy_process_group"})

Signature = tuple[str, int | None]


@dataclass(frozen=True, kw_only=True)
class WaitFinding:
    """Why ranks wait."""

    kind: Literal["differ", "deadlock", "late", "together"]
    rank: int | None
    """The rank at fault, as far as it can be told."""
    waiting: tuple[int, ...]
    """Ranks that wait."""
    call: WaitingCall | None
    """What they wait in."""
    text: str
    """The finding in a line."""
    stack: tuple[str, ...] = ()
    """Where the rank at fault is."""
    likely: str | None = None
    """The likely cause, once somebody has looked for it."""

    @property
    def is_certain_with(self) -> tuple[str | None, int | None]:
        """The group and number waited for; the same at two looks means that nothing moved."""
        return (None, None) if self.call is None else (self.call.group, self.call.sequence)


def explain_waits(statuses: Mapping[int, RankStatus], ended: Iterable[int] = ()) -> WaitFinding | None:
    """The reason why ranks wait; None if none does. `ended` are ranks that succeeded and are gone."""
    waiting = {rank: status.waiting for rank, status in statuses.items() if status.waiting is not None}
    gone = set(ended)
    for rank in gone:
        waiting.pop(rank, None)
    different = find_difference(statuses)
    if different is not None:
        return different
    if not waiting:
        return None
    edges = {rank: _late_for(rank, call, statuses, gone, waiting) for rank, call in waiting.items()}
    blamed = Counter(rank for late in edges.values() for rank in late if rank not in waiting)
    if blamed:
        rank = max(blamed, key=lambda one: (one in gone, blamed[one], -one))
        return _late_finding(rank, [one for one in waiting if rank in edges[one]], waiting, statuses, gone)
    stuck = _in_circles(edges)
    if stuck:
        return _deadlock(edges, {rank: waiting[rank] for rank in stuck})
    # Every member has begun what these wait in; others may wait for them in later operations.
    together = sorted(rank for rank in waiting if not edges[rank])
    call = waiting[together[0]]
    wait = "waits" if len(together) == 1 else "all wait"
    text = f"{ranks_text(together)} {wait} in {call.shown} since {call.age_s:.1f} s"
    return WaitFinding(kind="together", rank=None, waiting=tuple(together), call=call, text=text)


def _in_circles(edges: Mapping[int, set[int]]) -> set[int]:
    """The ranks that wait for each other in turn, and those that wait for them: nothing can free them."""
    stuck = set(edges)
    while free := {rank for rank in stuck if not edges[rank] & stuck}:
        stuck -= free
    return stuck


def _late_for(
    rank: int,
    call: WaitingCall,
    statuses: Mapping[int, RankStatus],
    gone: set[int],
    waiting: Mapping[int, WaitingCall],
) -> set[int]:
    """The ranks that `rank` waits for in `call`."""
    if call.peer is not None:
        return {call.peer} - {rank}
    members = set(call.members) if call.members is not None else set(statuses) | gone
    late = set()
    for other in members - {rank}:
        status = statuses.get(other)
        if other in gone and (status is None or call.group is None):
            late.add(other)
        elif status is None:
            continue
        elif call.group is None or call.sequence is None or _has_messages(status, call.group):
            theirs = waiting.get(other)
            if theirs is None or (theirs.op, theirs.group) != (call.op, call.group):
                late.add(other)
        elif status.last_sequence(call.group) < call.sequence:
            late.add(other)
    return late


def _has_messages(status: RankStatus, group: str) -> bool:
    """Whether the rank exchanged messages on the group: they count on two ranks only, so numbers do not compare."""
    history = status.groups.get(group)
    return history is not None and any(one.peer is not None for one in history.operations)


def _late_finding(
    rank: int,
    waiters: Sequence[int],
    waiting: Mapping[int, WaitingCall],
    statuses: Mapping[int, RankStatus],
    gone: set[int],
) -> WaitFinding:
    call = waiting[min(waiters)]
    age_s = max(waiting[one].age_s for one in waiters)
    have = "has" if len(waiters) == 1 else "have"
    place = f" ({call.at})" if call.at else ""
    start = f"{ranks_text(waiters)} {have} waited {age_s:.1f} s in {call.shown}{place} for rank {rank}"
    status = statuses.get(rank)
    stack: tuple[str, ...] = ()
    if rank in gone:
        text = f"{start}, which ended normally"
    elif status is None:
        text = start
    elif status.silence is not None:
        stack = status.stack
        text = f"{start}: {status.silence}" + ("; it is at:" if stack else "")
    else:
        stack = status.stack
        text = f"{start}, which is at:" if stack else start
    return WaitFinding(kind="late", rank=rank, waiting=tuple(sorted(waiters)), call=call, text=text, stack=stack)


def _deadlock(edges: Mapping[int, set[int]], waiting: Mapping[int, WaitingCall]) -> WaitFinding:
    """Every rank waits for another that waits: told by the call each set of ranks is in."""
    calls: dict[tuple[str, str | None, int | None], list[int]] = {}
    for rank, call in waiting.items():
        calls.setdefault((call.op, call.group, call.sequence), []).append(rank)
    parts = []
    for ranks in calls.values():
        call = waiting[min(ranks)]
        waits = "waits" if len(ranks) == 1 else "wait"
        late = sorted(set().union(*(edges[rank] for rank in ranks)))
        whom = f" for {ranks_text(late)}" if late else ""
        parts.append(f"{ranks_text(ranks)} {waits} in {call.shown}{f' ({call.at})' if call.at else ''}{whom}")
    fewest = min(calls.values(), key=lambda ranks: (len(ranks), -max(ranks)))
    for rank, call in sorted(waiting.items()):
        # One that waits for a message of a rank which has gone on to something else.
        theirs = waiting.get(call.peer) if call.peer is not None else None
        if call.peer is not None and theirs is not None and theirs.peer is None:
            text = "deadlock: " + "; ".join(parts)
            return WaitFinding(kind="deadlock", rank=call.peer, waiting=(rank,), call=call, text=text)
    return WaitFinding(
        kind="deadlock",
        rank=max(fewest),
        waiting=tuple(sorted(waiting)),
        call=waiting[max(fewest)],
        text="deadlock: " + "; ".join(parts),
    )


def find_difference(statuses: Mapping[int, RankStatus]) -> WaitFinding | None:
    """The first operation of a group that is not the same on all ranks that have begun it."""
    names = {name for status in statuses.values() for name in status.groups}
    for name in sorted(names):
        histories = {
            rank: status.groups[name]
            for rank, status in sorted(statuses.items())
            if name in status.groups and status.groups[name].operations
        }
        found = _difference_on(name, histories)
        if found is not None:
            return found
    return None


def _difference_on(name: str, histories: Mapping[int, GroupHistory]) -> WaitFinding | None:
    if len(histories) < 2 or any(one.peer is not None for each in histories.values() for one in each.operations):
        return None
    tables = {rank: {one.sequence: one for one in each.operations} for rank, each in histories.items()}
    first = max(min(table) for table in tables.values())
    last = min(max(table) for table in tables.values())
    for number in range(first, last + 1):
        here = {rank: table[number] for rank, table in tables.items() if number in table}
        if len({_signature(one) for one in here.values()}) > 1:
            odd = _odd_ranks(number, first, tables)
            return _difference_finding(name, number, here, odd, is_world=next(iter(histories.values())).is_world)
    return None


def _signature(one: SeenOperation) -> Signature:
    return one.op, one.num_bytes if one.op in _EQUAL_SIZES else None


def _odd_ranks(number: int, first: int, tables: Mapping[int, Mapping[int, SeenOperation]]) -> list[int]:
    """The ranks that left the common way: against the pattern of the steps before, or else in the minority."""
    here = {rank: _signature(table[number]) for rank, table in tables.items() if number in table}
    past = next(iter(tables.values()))
    before = [_signature(past[one]) for one in range(first, number) if one in past]
    expected = None
    for length in (3, 2, 1):
        recent = before[-length:]
        starts = [at for at in range(len(before) - length) if before[at : at + length] == recent]
        if len(recent) == length and starts:
            expected = before[starts[-1] + length]
            break
    usual = [rank for rank, one in here.items() if one == expected]
    if usual and len(usual) < len(here):
        return [rank for rank in here if rank not in usual]
    ranked = Counter(here.values()).most_common()
    fewest = ranked[-1][1]
    rare = {one for one, count in ranked if count == fewest}
    odd = [rank for rank, one in here.items() if one in rare]
    return odd if len(odd) < len(here) else [max(here)]


def _difference_finding(
    name: str, number: int, here: Mapping[int, SeenOperation], odd: Sequence[int], *, is_world: bool
) -> WaitFinding:
    sides: dict[Signature, list[int]] = {}
    for rank, one in here.items():
        sides.setdefault(_signature(one), []).append(rank)
    parts = []
    for ranks in sorted(sides.values(), key=lambda ranks: (ranks[0] not in odd, ranks)):
        one = here[ranks[0]]
        calls = "calls" if len(ranks) == 1 else "call"
        size = f" of {one.num_bytes} bytes" if one.num_bytes > 0 else ""
        place = f" at {one.at}" if one.at else ""
        parts.append(f"{ranks_text(ranks)} {calls} {one.op}{size}{place}")
    on_group = "" if is_world else f" on group {name}"
    others = tuple(rank for rank in here if rank not in odd)
    usual = here[others[0]] if others else here[odd[0]]
    call = WaitingCall(op=usual.op, group=name, is_world=is_world, sequence=number, num_bytes=usual.num_bytes)
    text = f"ranks went different ways at operation #{number}{on_group}: " + ", ".join(parts)
    return WaitFinding(kind="differ", rank=odd[0], waiting=others, call=call, text=text)


def is_decided_by_end(finding: WaitFinding, ended: Iterable[int]) -> bool:
    """Whether the ranks wait for one that has ended and so can never come."""
    if finding.kind != "late" or finding.rank not in set(ended) or finding.call is None:
        return False
    return finding.call.sequence is not None and finding.call.peer is None and finding.call.op not in _UNDECIDED


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 1`, or `ranks 0, 2 and 3`."""
    words = [str(rank) for rank in sorted(ranks)]
    if len(words) == 1:
        return f"rank {words[0]}"
    return "ranks " + ", ".join(words[:-1]) + " and " + words[-1]
