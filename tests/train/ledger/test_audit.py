"""The audit of what was trained on: by the time of reports, by the bounds of batches, by whose share it was."""

from __future__ import annotations

from itertools import permutations

import pytest

from torsh_distributed.events import SamplesEvent
from torsh_distributed.train.ledger.audit import EpochAudit, audit


def report(
    ids: tuple[int, ...],
    *,
    at: float,
    start: int | None = 0,
    total: int = 4,
    members: tuple[int, ...] = (0,),
    epoch: int = 0,
    batch: int = 0,
) -> SamplesEvent:
    return SamplesEvent(
        time=at, step=0, epoch=epoch, batch=batch, start=start, total=total, members=members, ids=ids, rank=members[0]
    )


def audited(*reports: SamplesEvent) -> EpochAudit:
    """The one epoch of these reports, which is the same in whatever order they are read."""
    found = [audit(order) for order in permutations(reports)]
    assert all(one == found[0] for one in found)
    (epoch,) = found[0]
    return epoch


def test_the_latest_reports_of_a_batch_count() -> None:
    found = audited(
        report((0, 1), at=1, members=(0,)),
        report((2, 3), at=2, members=(1,)),
        report((4, 5), at=3, members=(0,)),
        report((6, 7), at=4, members=(1,)),
    )
    assert sorted(found.times) == [4, 5, 6, 7]
    assert found.lost(range(8)) == [0, 1, 2, 3]
    assert found.doubled == []
    assert found.torn_batches == ()


def test_a_share_of_one_sample_is_not_left_out() -> None:
    found = audited(report((0, 1), at=2, total=3), report((2,), at=1, total=3, members=(1,)))
    assert sorted(found.times) == [0, 1, 2]
    assert found.torn_batches == ()


def test_a_share_that_was_reported_by_its_rank_and_for_it_counts_once() -> None:
    found = audited(
        report((0, 1), at=1, members=(0,)), report((0, 1), at=3, members=(0,)), report((2, 3), at=2, members=(1,))
    )
    assert dict(found.times) == {0: 1, 1: 1, 2: 1, 3: 1}


@pytest.mark.parametrize("ids", [(0, 1, 2), (0, 1, 2, 3, 4)], ids=["a sample short", "a sample too many"])
def test_a_batch_that_does_not_add_up_is_torn(ids: tuple[int, ...]) -> None:
    assert audited(report(ids, at=1, batch=7)).torn_batches == (7,)


def test_a_later_batch_of_other_bounds_undoes_what_it_overlaps_on_either_side() -> None:
    after = audited(report((0, 1, 2, 3), at=1), report((4, 5, 6, 7), at=2, start=2))
    assert sorted(after.times) == [4, 5, 6, 7]
    before = audited(report((4, 5, 6, 7), at=1, start=4), report((0, 1, 2, 3, 4, 5), at=2, start=0, total=6))
    assert sorted(before.times) == [0, 1, 2, 3, 4, 5]


def test_a_batch_between_two_later_ones_is_undone_by_the_one_before() -> None:
    found = audited(
        report((0, 1, 2, 3), at=3, start=0), report((8, 9, 10, 11), at=2, start=8), report((2, 3, 4, 5), at=1, start=2)
    )
    assert sorted(found.times) == [0, 1, 2, 3, 8, 9, 10, 11]


def test_neighbours_undo_nothing_whichever_was_done_first() -> None:
    for first, second in permutations((0, 4)):
        found = audited(
            report(tuple(range(first, first + 4)), at=1, start=first),
            report(tuple(range(second, second + 4)), at=2, start=second),
        )
        assert found.lost(range(8)) == []


def test_batches_whose_samples_were_not_counted_have_their_numbers_for_bounds() -> None:
    found = audited(*(report((2 * n, 2 * n + 1), at=9 - n, start=None, total=2, batch=n) for n in range(3)))
    assert found.lost(range(6)) == []


def test_epochs_come_in_order_and_by_number() -> None:
    found = audit([report((0, 1, 2, 3), at=1, epoch=1), report((0, 1, 2), at=2, epoch=0, total=3)])
    assert [(one.epoch, len(one.times)) for one in found] == [(0, 3), (1, 4)]
