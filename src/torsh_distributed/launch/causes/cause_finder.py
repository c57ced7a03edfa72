"""The cause of a failure, by cause and not by time: an error that says a peer is gone points to that peer. Pure."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping

from torsh_distributed.launch.causes.likely_cause import likely_cause
from torsh_distributed.launch.causes.waits import WaitFinding, explain_waits, find_difference, ranks_text
from torsh_distributed.launch.local.end_report import EndReport
from torsh_distributed.launch.worker.rank_status import RankStatus, WaitingCall

_GLOO_MISMATCH = "Received data size doesn't match expected size"


class CauseFinder:
    """What is known of one attempt's ranks, and the judgement on it."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.failures: dict[int, EndReport] = {}
        self.ended: dict[int, EndReport] = {}
        self.statuses: dict[int, RankStatus] = {}
        self._finished_s: dict[int, float] = {}
        self.finding: WaitFinding | None = None
        """The latest explanation of a wait."""

    @property
    def running(self) -> set[int]:
        """Ranks that have neither failed nor come to their end."""
        return set(range(self.num_ranks)) - self.failures.keys() - self.finished

    @property
    def finished(self) -> set[int]:
        """Ranks that ended normally, or are about to."""
        finishing = {rank for rank, status in self.statuses.items() if status.has_finished}
        return (self.ended.keys() | finishing) - self.failures.keys()

    @property
    def leaving(self) -> dict[int, float]:
        """Ranks whose script has ended and whose process has not, with the seconds since."""
        now_s = time.monotonic()
        gone = self.ended.keys() | self.failures.keys()
        return {rank: now_s - since_s for rank, since_s in self._finished_s.items() if rank not in gone}

    def note_status(self, status: RankStatus) -> None:
        """Keep what a rank says; a status without history does not make an earlier one forgotten."""
        before = self.statuses.get(status.rank)
        if status.has_finished:
            self._finished_s.setdefault(status.rank, time.monotonic())
        if before is not None:
            status = dataclasses.replace(
                status,
                groups=status.groups or before.groups,
                has_finished=status.has_finished or before.has_finished,
            )
        self.statuses[status.rank] = status

    def explain(self) -> WaitFinding | None:
        """Why ranks wait now; kept as the latest finding."""
        found = explain_waits(self.waiting_statuses(), self.finished)
        if found is not None:
            self.finding = found
        return found

    def waiting_statuses(self) -> dict[int, RankStatus]:
        """What every rank does; one whose deadline has passed still counts as waiting where it gave up."""
        found = {rank: status for rank, status in self.statuses.items() if rank not in self.failures}
        for rank, failure in self.failures.items():
            raised, status = failure.raised, self.statuses.get(rank)
            if raised is None or not raised.is_consequence or raised.operation is None or status is None:
                continue
            call = WaitingCall(op=raised.operation, sequence=raised.sequence, at=raised.where)
            for name, history in status.groups.items():
                last = next((one for one in history.operations if one.sequence == raised.sequence), None)
                if last is not None and last.op == raised.operation:
                    call = dataclasses.replace(
                        call,
                        group=name,
                        is_world=history.is_world,
                        members=history.members,
                        num_bytes=last.num_bytes,
                        peer=last.peer,
                    )
            if call.group is not None:  # else nothing tells whether the others were there
                found[rank] = dataclasses.replace(status, waiting=call)
        return found

    def primary(self) -> EndReport | None:
        """The earliest failure that is not a consequence of another rank's; None if all are.

        If memory ran out, the kernel may kill more than one, and who held most takes longest to end: size counts there.
        """
        own = [failure for failure in self.failures.values() if not failure.is_consequence]
        first = min(own, key=lambda failure: failure.at_s, default=None)
        if first is None or first.memory_bytes is None:
            return first
        starved = [failure for failure in own if failure.node_rank == first.node_rank]
        return max(starved, key=lambda failure: failure.memory_bytes or 0)

    def blamed(self) -> set[int]:
        """The ranks that consequences point to, without those that only suffer themselves."""
        peers = {peer for failure in self.failures.values() if failure.raised for peer in failure.raised.peers}
        return {peer for peer in peers if 0 <= peer < self.num_ranks and peer not in self.failures}

    def is_explained_by_end(self) -> bool:
        """Whether the failures so far follow from ranks that ended normally."""
        blamed, finished = self.blamed(), self.finished
        if not finished or blamed:
            return bool(finished) and blamed <= finished
        return not self.running or any(
            self._ended_before(rank, failure) for failure in self.failures.values() for rank in finished
        )

    def _ended_before(self, finished: int, failure: EndReport) -> bool:
        """Whether a rank ended without the operation that failed on another."""
        there, here = self.statuses.get(finished), self.statuses.get(failure.rank if failure.rank is not None else -1)
        if there is None or here is None or failure.raised is None or failure.raised.sequence is None:
            return False
        for name, history in here.groups.items():
            last = history.operations[-1] if history.operations else None
            if last is not None and (last.op, last.sequence) == (failure.raised.operation, failure.raised.sequence):
                return name in there.groups and there.last_sequence(name) < last.sequence
        return False

    def verdict(self) -> EndReport:
        """The cause by all that is known now; there is at least one failure, or a finding about a rank that ended."""
        primary = self.primary()
        if primary is not None:
            chosen = self._of_disagreement(primary) or primary
        else:
            chosen = self._of_ended() or self._of_in_flight() or self._of_waits() or self._of_absent() or self._first()
        chosen = dataclasses.replace(chosen, likely=self._likely(chosen))
        code = chosen.exit_code or next((one.exit_code for one in self.failures.values() if one.exit_code), 1)
        return dataclasses.replace(chosen, exit_code=code, consequences=self._consequences(chosen))

    def _likely(self, chosen: EndReport) -> str | None:
        """The likely cause of a wait that ended the job; an exception or a signal needs no guess."""
        if chosen.likely is not None or self.finding is None:
            return chosen.likely
        if self.finding.rank != chosen.rank or chosen.raised is not None:
            return None
        return likely_cause(self.finding, self.statuses, self.finished).line

    def _first(self) -> EndReport:
        return min(self.failures.values(), key=lambda failure: failure.at_s)

    def _of_disagreement(self, primary: EndReport) -> EndReport | None:
        """A backend noticed that ranks call different things: the rank that left the common way is the cause."""
        raised, statuses = primary.raised, self.statuses
        if raised is None and any(_GLOO_MISMATCH in line for line in primary.last_lines):
            statuses = self._statuses_with(primary)
        elif raised is None or raised.kind != "TensorShapeMismatch":
            return None
        found = find_difference(statuses)
        if found is None or found.rank is None:
            return None
        likely = likely_cause(found, statuses, self.finished).line
        return dataclasses.replace(
            self._about(found.rank), cause=found.text, likely=likely, raised=raised, where=None, last_lines=()
        )

    def _statuses_with(self, dead: EndReport) -> dict[int, RankStatus]:
        """The statuses, with what is known of a rank that died in a call: the call, and that it was the others' next.

        It took its records along, but up to that call they were those of the others.
        """
        statuses = dict(self.statuses)
        others = [status for rank, status in sorted(statuses.items()) if rank != dead.rank and status.groups]
        if dead.rank is None or dead.call is None or not others:
            return statuses
        name, history = max(
            ((name, one) for name, one in others[0].groups.items() if one.operations),
            key=lambda item: item[1].operations[-1].sequence,
        )
        last = history.operations[-1]
        if last.at is None:  # torch's recorder keeps no lines, but the rank is there, or gave up there
            last = dataclasses.replace(last, at=_line(self._place_of(others[0])))
            seen = dataclasses.replace(history, operations=(*history.operations[:-1], last))
            statuses[others[0].rank] = dataclasses.replace(others[0], groups={**others[0].groups, name: seen})
        other = dataclasses.replace(last, op=dead.call, num_bytes=-1, at=_line(dead.where))
        known = dataclasses.replace(history, operations=(*history.operations[:-1], other))
        statuses[dead.rank] = RankStatus(rank=dead.rank, groups={name: known})
        return statuses

    def _place_of(self, status: RankStatus) -> str | None:
        """The user's line at which a rank waits, or gave up waiting."""
        failure = self.failures.get(status.rank)
        raised = failure.raised if failure is not None else status.raised
        place = status.waiting.at if status.waiting is not None else None
        return place or (raised.where if raised is not None else None)

    def _of_ended(self) -> EndReport | None:
        """A rank that ended normally while others needed it."""
        candidates = self.blamed() & self.finished or (set() if self.blamed() else self.finished)
        if self.finding is not None and self.finding.rank in self.finished:
            candidates = {self.finding.rank}
        if not candidates:
            return None
        rank = min(candidates, key=lambda one: self.ended[one].at_s if one in self.ended else float("inf"))
        failure = self._about(rank)
        after = "" if failure.step is None else f" after {failure.step} step" + ("" if failure.step == 1 else "s")
        waited = self._waited()
        cause = f"ended normally{after} while {waited}" if waited else f"ended normally{after} while others went on"
        return dataclasses.replace(failure, cause=cause)

    def _waited(self) -> str | None:
        """`ranks 0 and 2 waited in all_reduce #118`."""
        words = {}
        for rank in range(self.num_ranks):
            words[rank] = _wait_of(self.failures.get(rank), self.statuses.get(rank))
        counted = [word for rank, word in words.items() if word is not None and rank not in self.finished]
        if not counted:
            return None
        common = max(set(counted), key=counted.count)
        return f"{ranks_text(rank for rank, word in words.items() if word == common)} {common}"

    def _of_in_flight(self) -> EndReport | None:
        """A rank others point to that reported an exception and has not come to its end yet."""
        for rank in sorted(self.blamed() or self.running):
            status = self.statuses.get(rank)
            if status is not None and status.raised is not None and not status.raised.is_consequence:
                return dataclasses.replace(
                    self._about(rank), cause=status.raised.summary, raised=status.raised, at_s=status.raised.at_s
                )
        return None

    def _of_waits(self) -> EndReport | None:
        """What the ranks' own records show: different ways, a deadlock, or one that never came."""
        found = find_difference(self.statuses) or self.finding
        if found is None or found.rank is None or (found.rank in self.failures and found.kind == "late"):
            return None
        if found.kind == "late":
            call = found.call.shown if found.call is not None else "a collective"
            status = self.statuses.get(found.rank)
            silence = f": {status.silence}" if status is not None and status.silence else ""
            cause = f"did not come to {call}, where {ranks_text(found.waiting)} waited{silence}"
        else:
            cause = found.text
        return dataclasses.replace(self._about(found.rank), cause=cause, stack=found.stack)

    def _of_absent(self) -> EndReport | None:
        """A rank others point to that lives, has raised nothing and did not come."""
        blamed = self.blamed() - self.finished
        if not blamed:
            return None
        rank = min(blamed)
        first = self._first()
        status = self.statuses.get(rank)
        said = first.raised.summary if first.raised is not None else first.cause
        silence = f"; {status.silence}" if status is not None and status.silence else ""
        cause = f"rank {first.rank} gave up on it: {said}{silence}"
        return dataclasses.replace(self._about(rank), cause=cause, stack=status.stack if status is not None else ())

    def _about(self, rank: int) -> EndReport:
        """A record of a rank, whether it failed, ended or runs."""
        known = self.failures.get(rank) or self.ended.get(rank)
        if known is not None:
            return known
        status = self.statuses.get(rank)
        if status is None:
            return EndReport(node_rank=0, node_name="", rank=rank, cause="")
        return EndReport(
            node_rank=status.node_rank,
            node_name=status.node_name,
            rank=rank,
            pid=status.pid,
            cause="",
            step=status.step,
            checkpoint_step=status.checkpoint_step,
        )

    def _consequences(self, chosen: EndReport) -> tuple[str, ...]:
        """What the other ranks did, ranks that did the same together."""
        words: dict[str, list[int]] = {}
        for rank in range(self.num_ranks):
            if rank == chosen.rank:
                continue
            word = _state_of(rank, chosen, self.failures, self.finished, self.statuses)
            if word is not None:
                words.setdefault(word, []).append(rank)
        told = [f"{ranks_text(ranks)} {word}" for word, ranks in words.items()]
        return tuple(text for text in told if text not in chosen.cause)


def _line(place: str | None) -> str | None:
    """`train.py:12`, of `train.py:12 in step`."""
    return place.partition(" in ")[0] if place else None


def _wait_of(failure: EndReport | None, status: RankStatus | None) -> str | None:
    if failure is not None and failure.raised is not None and failure.raised.is_consequence:
        if failure.raised.operation is None:
            return None
        number = "" if failure.raised.sequence is None else f" #{failure.raised.sequence}"
        return f"waited in {failure.raised.operation}{number}"
    if failure is None and status is not None and status.waiting is not None:
        return f"waited in {status.waiting.shown}"
    return None


def _state_of(
    rank: int,
    chosen: EndReport,
    failures: Mapping[int, EndReport],
    finished: set[int],
    statuses: Mapping[int, RankStatus],
) -> str | None:
    failure, status = failures.get(rank), statuses.get(rank)
    wait = _wait_of(failure, status)
    if wait is not None:
        return wait
    if failure is not None:
        if failure.raised is not None and failure.raised is chosen.raised:
            return f"noticed it, with {failure.raised.kind} in {failure.raised.where}"
        same = failure.raised is not None and chosen.raised is not None and failure.raised.kind == chosen.raised.kind
        return f"raised {failure.raised.kind} too" if same and failure.raised else f"ended: {failure.cause}"
    if rank in finished:
        return "had ended normally"
    return None
