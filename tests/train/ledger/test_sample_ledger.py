"""The ledger: after any kills, joins, restarts and changes of the world, every epoch has every sample once."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from torsh_distributed import events
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.train.ledger.audit import audit
from torsh_distributed.train.ledger.sample_ledger import SampleLedger


def order_of(seed: int, epoch: int, size: int) -> list[int]:
    """A pure function of seed and epoch, as the Engine's."""
    order = list(range(size))
    random.Random(seed * 1000 + epoch).shuffle(order)
    return order


@dataclass
class Member:
    """One worker: a ledger, and the samples whose gradients it holds."""

    ledger: SampleLedger = field(default_factory=SampleLedger)
    gradients: list[int] = field(default_factory=list)


class Training(RuleBasedStateMachine):
    """Workers that die, join, restart from checkpoints and take steps back, in any order that hypothesis finds."""

    members = Bundle("members")

    @initialize(size=st.integers(1, 30), batch_size=st.integers(1, 8), num_members=st.integers(1, 4))
    def start(self, size: int, batch_size: int, num_members: int) -> None:
        self.size, self.batch_size = size, batch_size
        self.alive: dict[int, Member] = {number: Member() for number in range(num_members)}
        self.next_member = num_members
        self.step = 0
        self.is_open = False
        self.trained: list[tuple[int, list[int]]] = []  # by step: epoch, samples
        self.saved: tuple[int, dict[str, Any]] = (0, {"epoch": 0, "num_batches": 0, "position": None})

    def any_ledger(self) -> SampleLedger:
        return next(iter(self.alive.values())).ledger

    @precondition(lambda self: not self.is_open)
    @rule()
    def begin_step(self) -> None:
        ledger = self.any_ledger()
        if ledger.num_samples == self.size:
            for member in self.alive.values():
                member.ledger.next_epoch()
        assert ledger.num_samples is not None
        start = ledger.num_samples
        batch = order_of(7, ledger.epoch, self.size)[start : start + self.batch_size]
        for number, member in self.alive.items():
            member.ledger.open(len(batch), ids=batch)
            member.gradients = list(member.ledger.assign(self.step, list(self.alive), me=number))
        self.is_open = True

    @precondition(lambda self: len(self.alive) > 1)
    @rule(choice=st.integers(0, 100))
    def kill(self, choice: int) -> None:
        """Survivors keep their gradients and do what the dead one had to do."""
        del self.alive[list(self.alive)[choice % len(self.alive)]]
        if self.is_open:
            for number, member in self.alive.items():
                member.gradients += member.ledger.assign(self.step, list(self.alive), me=number)
        else:
            for member in self.alive.values():
                member.ledger.recut()

    @precondition(lambda self: not self.is_open and len(self.alive) < 6)
    @rule()
    def join(self) -> None:
        newcomer = Member()
        newcomer.ledger.load_state_dict(self.any_ledger().state_dict())
        self.alive[self.next_member] = newcomer
        self.next_member += 1

    @precondition(lambda self: self.is_open)
    @rule()
    def take_back(self) -> None:
        for member in self.alive.values():
            member.ledger.take_back()
            member.gradients = []
        self.is_open = False

    @precondition(lambda self: self.is_open)
    @rule()
    def commit(self) -> None:
        epoch = self.any_ledger().epoch
        samples = [sample for member in self.alive.values() for sample in member.gradients]
        for member in self.alive.values():
            assert sorted(member.gradients) == sorted(member.ledger.held())
            member.ledger.commit(self.step)
        self.trained.append((epoch, samples))
        self.step += 1
        self.is_open = False

    @rule()
    def save(self) -> None:
        """At any time: what is in progress is not in it."""
        self.saved = (self.step, self.any_ledger().state_dict())

    @rule(num_members=st.integers(1, 5), batch_size=st.integers(1, 8))
    def restart(self, num_members: int, batch_size: int) -> None:
        """Everybody dies; another number of workers starts from the checkpoint, with batches of another size."""
        self.step, state = self.saved
        self.batch_size = batch_size
        self.alive = {number: Member() for number in range(num_members)}
        for member in self.alive.values():
            member.ledger.load_state_dict(state)
        self.trained = self.trained[: self.step]
        self.is_open = False

    @invariant()
    def every_sample_once(self) -> None:
        if not hasattr(self, "alive"):
            return
        states = [member.ledger.state_dict() for member in self.alive.values()]
        assert all(state == states[0] for state in states)
        epochs: dict[int, Counter[int]] = {}
        for epoch, samples in self.trained:
            epochs.setdefault(epoch, Counter()).update(samples)
        for epoch, counts in epochs.items():
            assert set(counts.values()) <= {1}
            if epoch < states[0]["epoch"]:
                assert sorted(counts) == list(range(self.size))


Training.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTraining = Training.TestCase


@given(
    total=st.integers(1, 60),
    losses=st.lists(st.sets(st.integers(0, 7), max_size=3), max_size=4),
)
def test_what_the_lost_had_is_shared_evenly_and_nothing_else_moves(total: int, losses: list[set[int]]) -> None:
    alive = list(range(8))
    held: dict[int, list[int]] = {}
    ledgers = {member: SampleLedger() for member in alive}
    for member, ledger in ledgers.items():
        ledger.open(total)
        held[member] = list(ledger.assign(3, alive, me=member))
    for lost in losses:
        remaining = [member for member in alive if member not in lost]
        if not remaining:
            break
        alive = remaining
        extra = {member: ledgers[member].assign(3, alive) for member in alive}
        sizes = [len(rows) for rows in extra.values()]
        assert max(sizes) - min(sizes) <= 1
        held = {member: held[member] + list(extra[member]) for member in alive}
    assert sorted(row for rows in held.values() for row in rows) == list(range(total))
    for member in alive:
        assert sorted(ledgers[member].held()) == sorted(held[member])


def test_a_member_that_was_lost_cannot_return_within_the_step() -> None:
    ledger = SampleLedger()
    ledger.open(9)
    ledger.assign(0, [0, 1, 2])
    ledger.assign(0, [0, 1])
    with pytest.raises(InvalidArgument, match="cannot come back within it"):
        ledger.assign(0, [0, 1, 2])
    with pytest.raises(InvalidArgument, match="another step"):
        ledger.assign(1, [0, 1])
    ledger.take_back()
    ledger.open(9)
    assert ledger.assign(0, [0, 1, 2]) == (0, 1, 2)


def test_only_a_commit_moves_the_position() -> None:
    ledger = SampleLedger()
    ledger.open(4, position={"at": 4})
    nothing = {"epoch": 0, "num_batches": 0, "num_samples": 0, "position": None, "data": {}}
    assert ledger.state_dict() == nothing
    ledger.commit(0)
    assert ledger.state_dict() == {**nothing, "num_batches": 1, "num_samples": 4, "position": {"at": 4}}
    ledger.commit(1)  # a step on a batch of the user's own
    assert ledger.num_batches == 1
    with pytest.raises(InvalidArgument, match="no batch is in progress"):
        ledger.assign(1, [0])


def test_the_share_of_a_lost_member_counts_once_however_often_it_is_told() -> None:
    """Member 1 is lost after the update, having reported it or not."""
    for lives_to_report in (True, False):
        seen: list[events.SamplesEvent] = []
        end = events.subscribe(seen.append, events.SamplesEvent)  # type: ignore[arg-type]
        try:
            ledgers = [SampleLedger() for _ in range(3)]
            for me, ledger in enumerate(ledgers):
                ledger.open(7)
                ledger.assign(0, [0, 1, 2], me=me)
                if me != 1 or lives_to_report:
                    ledger.commit(0)
            ledgers[0].next_epoch()
            ledgers[0].report_lost([1])
            ledgers[0].report_lost([2])  # lost later: it has reported
        finally:
            end()
        (found,) = audit(seen)
        assert sorted(found.times.elements()) == list(range(7))
        assert found.torn_batches == ()


def test_the_audit_counts_what_was_not_undone() -> None:
    seen: list[events.SamplesEvent] = []
    end = events.subscribe(seen.append, events.SamplesEvent)  # type: ignore[arg-type]
    try:
        for members in ([0, 1, 2], [0, 1]):  # the step is undone, and done again by two
            for me in members:
                ledger = SampleLedger()
                ledger.open(5, ids=[10, 11, 12, 13, 14])
                ledger.assign(0, members, me=me)
                ledger.commit(0)
        ledger.open(2, ids=[15, 12])  # doubles a sample, and is told by one of two
        ledger.assign(1, [0, 1], me=1)
        ledger.commit(1)
    finally:
        end()
    (found,) = audit(seen)
    assert found.times[10] == found.times[14] == 1
    assert found.doubled == [12]
    assert found.lost(range(10, 17)) == [15, 16]
    assert found.torn_batches == (1,)


def test_the_audit_knows_batches_that_were_done_again_in_another_size() -> None:
    """Batches of 4 up to sample 12; then from a checkpoint at 4 on in batches of 6."""
    seen: list[events.SamplesEvent] = []
    end = events.subscribe(seen.append, events.SamplesEvent)  # type: ignore[arg-type]
    try:
        ledger, state = SampleLedger(), {}
        for step, (start, stop) in enumerate([(0, 4), (4, 8), (8, 12), (4, 10), (10, 16)]):
            if step == 3:
                ledger.load_state_dict(state)
            ledger.open(stop - start, ids=range(start, stop))
            ledger.assign(step, [0])
            ledger.commit(step)
            if step == 0:
                state = ledger.state_dict()
    finally:
        end()
    (found,) = audit(seen)
    assert found.doubled == found.lost(range(16)) == []
    assert found.torn_batches == ()


def test_a_state_that_counted_batches_alone_is_loaded() -> None:
    ledger = SampleLedger()
    ledger.load_state_dict({"epoch": 2, "num_batches": 3})
    assert (ledger.num_batches, ledger.num_samples) == (3, None)
    ledger.use_data({"samples": 40})
    ledger.open(4)
    ledger.commit(0)
    assert (ledger.num_batches, ledger.num_samples) == (4, None)
    ledger.next_epoch()
    assert ledger.num_samples == 0
    ledger.load_state_dict({"epoch": 2, "num_batches": 0})
    assert ledger.num_samples == 0


def test_what_was_prepared_holds_until_a_roll_back() -> None:
    ledger = SampleLedger()
    start = ledger.state_dict()
    ledger.open(4)
    assert ledger.pass_over()
    ledger.open(4)
    ledger.commit(0)
    assert ledger.pass_over(), "nothing is left to pass over, and what comes next still holds"
    ledger.open(4)
    ledger.load_state_dict(start)
    assert not ledger.pass_over()
    assert ledger.num_batches == 0, "a batch that was rolled back is not passed over"
    ledger.open(4)
    assert ledger.pass_over()


def test_other_data_are_refused_in_mid_epoch_alone() -> None:
    ledger = SampleLedger()
    facts = {"samples": 40, "order": "SequentialSampler", "fingerprint": None}
    ledger.use_data({**facts, "samples": 30})
    ledger.use_data(facts)  # nothing was done
    ledger.open(4)
    ledger.commit(0)
    restarted = SampleLedger()
    restarted.load_state_dict(ledger.state_dict())
    restarted.use_data({**facts, "fingerprint": "a7"})  # there was none before
    with pytest.raises(InvalidArgument, match=r"after 4 samples, and these are other data: samples was 40 and is 41"):
        ledger.use_data({**facts, "samples": 41})
    with pytest.raises(InvalidArgument, match=r"fingerprint was a7 and is b3"):
        restarted.use_data({**facts, "fingerprint": "b3"})
    restarted.next_epoch()
    restarted.use_data({**facts, "samples": 41})
