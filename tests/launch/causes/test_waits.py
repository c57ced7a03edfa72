from __future__ import annotations

from torsh_distributed.launch.causes.waits import explain_waits, find_difference, is_decided_by_end, ranks_text
from torsh_distributed.launch.worker.rank_status import GroupHistory, RankStatus, SeenOperation, WaitingCall

EVERYONE = (0, 1, 2)


def history(*operations: tuple[int, str, int], peer: int | None = None) -> GroupHistory:
    return GroupHistory(
        members=EVERYONE,
        operations=tuple(SeenOperation(sequence=n, op=op, num_bytes=size, peer=peer) for n, op, size in operations),
    )


def steps(last: int, *, size: int = 100) -> GroupHistory:
    return history(*((number, "all_reduce", size) for number in range(1, last + 1)))


def waiting(number: int | None, group: str | None = "0", *, op: str = "all_reduce", age_s: float = 2.5) -> WaitingCall:
    return WaitingCall(op=op, group=group, sequence=number, members=EVERYONE, age_s=age_s, at="train.py:7 in step")


def test_a_rank_with_a_lower_number_is_late_and_its_stack_is_shown() -> None:
    statuses = {
        0: RankStatus(rank=0, waiting=waiting(9), groups={"0": steps(9)}),
        1: RankStatus(rank=1, groups={"0": steps(8)}, stack=('  File "train.py", line 3, in load',)),
        2: RankStatus(rank=2, waiting=waiting(9), groups={"0": steps(9)}),
    }
    found = explain_waits(statuses)
    assert found is not None
    assert (found.kind, found.rank, found.waiting) == ("late", 1, (0, 2))
    assert (
        found.text == "ranks 0 and 2 have waited 2.5 s in all_reduce #9 (train.py:7 in step) for rank 1, which is at:"
    )
    assert found.stack


def test_a_silent_rank_is_late_for_the_reason_it_is_silent() -> None:
    statuses = {
        0: RankStatus(rank=0, waiting=waiting(9), groups={"0": steps(9)}),
        1: RankStatus(rank=1, silence="it does not answer: it is stopped"),
        2: RankStatus(rank=2, waiting=waiting(9), groups={"0": steps(9)}),
    }
    found = explain_waits(statuses)
    assert found is not None
    assert found.rank == 1
    assert found.text.endswith("for rank 1: it does not answer: it is stopped")


def test_a_rank_that_ended_before_the_operation_can_never_come() -> None:
    statuses = {
        0: RankStatus(rank=0, waiting=waiting(9), groups={"0": steps(9)}),
        1: RankStatus(rank=1, groups={"0": steps(8)}),
        2: RankStatus(rank=2, groups={"0": steps(8)}),
    }
    found = explain_waits(statuses, ended=[1])
    assert found is not None
    assert (found.kind, found.rank) == ("late", 1)
    assert is_decided_by_end(found, [1])
    assert not is_decided_by_end(found, [2])


def test_a_rank_that_did_its_part_and_ended_is_not_waited_for() -> None:
    """The root of a broadcast may leave while the others still receive."""
    statuses = {
        0: RankStatus(rank=0, groups={"0": steps(9)}),
        1: RankStatus(rank=1, waiting=waiting(9), groups={"0": steps(9)}),
        2: RankStatus(rank=2, groups={"0": steps(9)}),
    }
    found = explain_waits(statuses, ended=[0])
    assert found is not None
    assert found.kind == "together"
    assert not is_decided_by_end(found, [0])


def test_a_rank_that_is_ahead_makes_no_deadlock() -> None:
    """Rank 1 has started two more operations; what rank 0 waits in, all have begun: it is slow, not stuck."""
    statuses = {
        0: RankStatus(rank=0, waiting=waiting(7), groups={"0": steps(7)}),
        1: RankStatus(rank=1, waiting=waiting(9), groups={"0": steps(9)}),
        2: RankStatus(rank=2, waiting=waiting(7), groups={"0": steps(7)}),
    }
    found = explain_waits(statuses)
    assert found is not None
    assert (found.kind, found.rank, found.waiting) == ("together", None, (0, 2))
    assert found.text == "ranks 0 and 2 all wait in all_reduce #7 since 2.5 s"


def test_ranks_in_a_deadlock_are_found_beside_one_that_only_waits_long() -> None:
    statuses = {
        0: RankStatus(rank=0, waiting=waiting(1, "a"), groups={"a": steps(1), "b": steps(1), "0": steps(3)}),
        1: RankStatus(rank=1, waiting=waiting(2, "b"), groups={"b": steps(2), "0": steps(3)}),
        2: RankStatus(rank=2, waiting=waiting(3), groups={"a": steps(1), "b": steps(2), "0": steps(3)}),
    }
    found = explain_waits(statuses)
    assert found is not None
    assert (found.kind, found.waiting) == ("deadlock", (0, 1))


def test_calls_of_torch_without_numbers_never_decide() -> None:
    statuses = {
        0: RankStatus(rank=0, waiting=waiting(None, None, op="destroy_process_group")),
        2: RankStatus(rank=2, waiting=waiting(None, None, op="destroy_process_group")),
    }
    found = explain_waits(statuses, ended=[1])
    assert found is not None
    assert not is_decided_by_end(found, [1])


def test_two_groups_in_different_order_are_a_deadlock() -> None:
    statuses = {
        0: RankStatus(rank=0, waiting=waiting(5, "a"), groups={"a": steps(5), "b": steps(4)}),
        1: RankStatus(rank=1, waiting=waiting(5, "b"), groups={"a": steps(4), "b": steps(5)}),
        2: RankStatus(rank=2, waiting=waiting(5, "a"), groups={"a": steps(5), "b": steps(4)}),
    }
    found = explain_waits(statuses)
    assert found is not None
    assert (found.kind, found.rank) == ("deadlock", 1)
    assert "ranks 0 and 2 wait in all_reduce #5" in found.text
    assert "rank 1 waits in all_reduce #5" in found.text


def test_a_chain_of_waits_ends_at_the_rank_that_does_not_wait() -> None:
    statuses = {
        0: RankStatus(rank=0, waiting=waiting(5, "a"), groups={"a": steps(5), "b": steps(4)}),
        1: RankStatus(rank=1, waiting=waiting(5, "b"), groups={"a": steps(4), "b": steps(5)}),
        2: RankStatus(rank=2, groups={"a": steps(5), "b": steps(4)}),
    }
    found = explain_waits(statuses)
    assert found is not None
    assert (found.kind, found.rank) == ("late", 2)


def test_the_rank_in_the_minority_went_a_different_way() -> None:
    statuses = {
        0: RankStatus(rank=0, groups={"0": history((7, "all_reduce", 400))}),
        1: RankStatus(rank=1, groups={"0": history((7, "barrier", 0))}),
        2: RankStatus(rank=2, groups={"0": history((7, "all_reduce", 400))}),
    }
    found = find_difference(statuses)
    assert found is not None
    assert (found.kind, found.rank) == ("differ", 1)
    assert found.text == (
        "ranks went different ways at operation #7: rank 1 calls barrier, ranks 0 and 2 call all_reduce of 400 bytes"
    )


def test_of_two_ranks_the_one_against_the_pattern_went_a_different_way() -> None:
    usual = [(number, "all_reduce", 4000 if number % 2 else 4) for number in range(1, 10)]
    for odd in (0, 1):
        statuses = {
            rank: RankStatus(
                rank=rank, groups={"0": history(*([*usual[:-1], (9, "all_reduce", 4)] if rank == odd else usual))}
            )
            for rank in (0, 1)
        }
        found = find_difference(statuses)
        assert found is not None
        assert found.rank == odd


def test_sizes_that_may_differ_and_messages_are_no_difference() -> None:
    uneven = {rank: RankStatus(rank=rank, groups={"0": history((1, "all_gather", 100 * rank))}) for rank in EVERYONE}
    assert find_difference(uneven) is None
    messages = {
        0: RankStatus(rank=0, groups={"0": history((1, "send", 8), peer=1)}),
        1: RankStatus(rank=1, groups={"0": history((1, "recv", 8), peer=0)}),
    }
    assert find_difference(messages) is None


def test_nobody_waits_when_nobody_waits() -> None:
    assert explain_waits({rank: RankStatus(rank=rank, groups={"0": steps(rank + 1)}) for rank in EVERYONE}) is None


def test_ranks_in_words() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([2, 0, 3]) == "ranks 0, 2 and 3"
