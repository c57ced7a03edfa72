"""The ledger of samples: what is done, what belongs to the step in progress, and to whom.

The order of an epoch is a function of seed and epoch. What is done is one position in it, which moves with the
optimizer's step and in no other way. A step's global batch is cut over the members that are alive in it; if one is lost
within the step, its part is cut again over those that remain. Nothing here communicates: every rank computes the same
from the same calls, and a rank that joins between two steps needs the position alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torsh_distributed import events
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.train.batches import rows_of
from torsh_distributed.train.ledger.data_position import OTHER_DATA_HINT


@dataclass(frozen=True)
class _Cut:
    """Rows of a global batch, divided among members in their order."""

    rows: Sequence[int]
    members: tuple[int, ...]

    def part_of(self, member: int) -> Sequence[int]:
        if member not in self.members:
            return ()
        share = rows_of(len(self.rows), part=self.members.index(member), num_parts=len(self.members))
        return self.rows[share.start : share.stop]


@dataclass
class _OpenBatch:
    """The global batch of the step in progress."""

    total: int
    ids: Sequence[int] | None
    position: Any
    step: int | None = None
    cuts: list[_Cut] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)

    def rows_of_member(self, member: int) -> list[int]:
        return [row for cut in self.cuts for row in cut.part_of(member)]

    def ids_of(self, rows: Sequence[int]) -> tuple[int, ...]:
        return tuple(rows) if self.ids is None else tuple(self.ids[row] for row in rows)


class _CommittedBatch(NamedTuple):
    step: int
    epoch: int
    number: int
    start: int | None
    batch: _OpenBatch


class SampleLedger:
    """Which samples are done (`epoch`, `num_samples`), and who works on those of the step in progress.

    `open` the next global batch, `assign` it to members, `commit` it with the update. After a member is lost, `assign`
    with those that remain gives what each has to do in addition, and keeps what it has done; or `take_back` voids the
    step's shares, and the batch is cut again. The Engine opens and commits; recovery assigns and takes back.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.num_batches = 0
        """Batches of this epoch whose update is done."""
        self.num_samples: int | None = 0
        """Their samples; None after the state of an earlier version, which counted batches alone."""
        self.data: dict[str, Any] = {}
        """What is known of the data that this epoch is read from."""
        self.position: Any = None
        """Where a stream stands after the last of them, as its `state_dict` says; None for data with indices."""
        self.version = 0
        """Changes when batches that were prepared no longer hold: after `take_back`, `load_state_dict`, `recut`."""
        self._open: _OpenBatch | None = None
        self._opened_version = 0
        self._last: _CommittedBatch | None = None
        self._me = 0

    @property
    def is_open(self) -> bool:
        """Whether a batch is handed out and its update not done."""
        return self._open is not None

    @property
    def total(self) -> int:
        """Samples of the global batch in progress."""
        return self._require_open().total

    def use_data(self, facts: Mapping[str, Any]) -> None:
        """The data to read from, as `describe_data` has them; others in mid-epoch are refused, with what differs."""
        differing = {
            name: (self.data[name], value)
            for name, value in facts.items()
            if None not in (value, self.data.get(name)) and value != self.data[name]
        }
        if self.num_batches and differing:
            said = "; ".join(f"{name} was {before} and is {now}" for name, (before, now) in differing.items())
            raise InvalidArgument(
                f"epoch {self.epoch} was interrupted after {self._how_far()}, and these are other data: {said}",
                hint=OTHER_DATA_HINT,
            )
        self.data = dict(facts)

    def _how_far(self) -> str:
        return f"{self.num_batches} batches" if self.num_samples is None else f"{self.num_samples} samples"

    def open(self, total: int, *, ids: Sequence[int] | None = None, position: Any = None) -> None:
        """The next global batch: `total` samples, with their indices, or with where the stream stands after them."""
        self._open = _OpenBatch(total, ids, position)
        self._opened_version = self.version

    def assign(self, step: int, members: Sequence[int], *, me: int | None = None) -> tuple[int, ...]:
        """What this member has to do now: indices of the dataset, or rows of the batch for a stream.

        The first call of a step cuts the batch over `members`, in their order. A later one with fewer members gives
        this member's part of what the lost ones had. Every member makes the same calls; `me` is remembered.
        """
        batch = self._require_open()
        now = tuple(members)
        self._me = self._me if me is None else me
        if not now or len(set(now)) != len(now) or self._me not in now:
            raise InvalidArgument("members are distinct, and this one is among them", members=now, me=self._me)
        if batch.step not in (None, step):
            raise InvalidArgument(
                "the batch in progress belongs to another step",
                hint="commit or take back the step before the next is assigned",
                step=step,
                open_step=batch.step,
            )
        batch.step = step
        if not batch.cuts:
            batch.cuts.append(_Cut(range(batch.total), now))
            return batch.ids_of(batch.cuts[0].part_of(self._me))
        returned = batch.lost.intersection(now)
        if returned:
            raise InvalidArgument(
                "a member that was lost in this step cannot come back within it",
                hint="it joins between two steps",
                members=sorted(returned),
            )
        known = dict.fromkeys(member for cut in batch.cuts for member in cut.members)
        gone = [member for member in known if member not in now and member not in batch.lost]
        pool = sorted(row for member in gone for row in batch.rows_of_member(member))
        batch.lost.update(gone)
        cut = _Cut(pool, now)
        batch.cuts.append(cut)
        return batch.ids_of(cut.part_of(self._me))

    def held(self, member: int | None = None) -> tuple[int, ...]:
        """All that a member (this one) has to do in the step in progress."""
        batch = self._require_open()
        wanted = self._me if member is None else member
        return () if wanted in batch.lost else batch.ids_of(batch.rows_of_member(wanted))

    def commit(self, step: int) -> None:
        """The update of the batch in progress is done; nothing happens if none is in progress."""
        batch, self._open = self._open, None
        if batch is None:
            return
        self._last = _CommittedBatch(step, self.epoch, self.num_batches, self.num_samples, batch)
        self._move_past(batch)
        self._report([self._me])

    def report_lost(self, members: Sequence[int]) -> None:
        """Report the samples of the last commit for members of it that were lost since; one survivor calls this.

        Their gradients are in the update; whether they lived to report it, nobody knows. Once for each commit: who is
        lost later has reported it.
        """
        self._report(members)
        self._last = None

    def _report(self, members: Sequence[int]) -> None:
        if self._last is None or not events.wanted(events.SamplesEvent):
            return
        step, epoch, number, start, batch = self._last
        rows = [row for member in members if member not in batch.lost for row in batch.rows_of_member(member)]
        events.emit(
            events.SamplesEvent(
                step=step,
                epoch=epoch,
                batch=number,
                start=start,
                total=batch.total,
                members=tuple(members),
                ids=batch.ids_of(rows),
            )
        )

    def pass_over(self) -> bool:
        """The batch in progress, unless its update is done, is not trained on, and not handed out again either.

        Returns whether those prepared after it hold: not after a roll back.
        """
        batch, self._open = self._open, None
        if batch is not None:
            self._move_past(batch)
        return self.version == self._opened_version

    def _move_past(self, batch: _OpenBatch) -> None:
        self.num_batches += 1
        if self.num_samples is not None:
            self.num_samples += batch.total
        self.position = batch.position

    def take_back(self) -> None:
        """The step in progress is void: its batch is handed out again and cut again. Harmless between steps."""
        self._open = None
        self.version += 1

    def recut(self) -> None:
        """The members changed between two steps: batches prepared for the old ones are prepared again."""
        self.version += 1

    def next_epoch(self) -> None:
        """Every batch of the epoch is done."""
        self.epoch += 1
        self.num_batches = self.num_samples = 0
        self.data, self.position, self._open = {}, None, None

    def state_dict(self) -> dict[str, Any]:
        """What is done; a batch in progress is not."""
        return {
            "epoch": self.epoch,
            "num_batches": self.num_batches,
            "num_samples": self.num_samples,
            "position": self.position,
            "data": dict(self.data),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()` of any member, with any members."""
        self.epoch, self.num_batches = state["epoch"], state["num_batches"]
        self.num_samples = state.get("num_samples", None if self.num_batches else 0)
        self.position, self.data = state.get("position"), dict(state.get("data", {}))
        self.take_back()

    def _require_open(self) -> _OpenBatch:
        if self._open is None:
            raise InvalidArgument("no batch is in progress", hint="take one from engine.batches first")
        return self._open
