from __future__ import annotations

from typing import Any

from torsh_distributed.launch.causes.cause_finder import CauseFinder
from torsh_distributed.launch.local.end_report import EndReport
from torsh_distributed.launch.worker.rank_status import (
    GroupHistory,
    RaisedError,
    RankStatus,
    SeenOperation,
    WaitingCall,
)


def own_failure(rank: int, *, at_s: float, kind: str = "ValueError") -> EndReport:
    raised = RaisedError(kind=kind, message="no", where="train.py:3 in step", at_s=at_s)
    return EndReport(node_rank=0, node_name="n", rank=rank, cause=raised.summary, raised=raised, at_s=at_s)


def consequence(rank: int, *, at_s: float, peers: tuple[int, ...] = ()) -> EndReport:
    raised = RaisedError(
        kind="CommunicationError",
        message="gone",
        is_consequence=True,
        peers=peers,
        operation="all_reduce",
        sequence=118,
        at_s=at_s,
    )
    return EndReport(
        node_rank=0, node_name="n", rank=rank, cause=raised.summary, raised=raised, is_consequence=True, at_s=at_s
    )


def ended(rank: int, **changes: Any) -> EndReport:
    return EndReport(node_rank=0, node_name="n", rank=rank, exit_code=0, cause="ended normally", **changes)


def finder(*failures: EndReport, num_ranks: int = 4) -> CauseFinder:
    found = CauseFinder(num_ranks)
    for failure in failures:
        assert failure.rank is not None
        (found.failures if failure.exit_code else found.ended)[failure.rank] = failure
    return found


def test_a_cause_wins_over_consequences_that_came_first() -> None:
    found = finder(consequence(0, at_s=1, peers=(2,)), consequence(3, at_s=2), own_failure(2, at_s=3))
    verdict = found.verdict()
    assert verdict.rank == 2
    assert verdict.consequences == ("ranks 0 and 3 waited in all_reduce #118",)


def test_of_several_causes_the_earliest_counts() -> None:
    verdict = finder(own_failure(3, at_s=2), own_failure(1, at_s=1)).verdict()
    assert verdict.rank == 1
    assert verdict.consequences == ("rank 3 raised ValueError too",)


def test_of_several_that_the_kernel_killed_for_memory_the_one_that_held_most_counts() -> None:
    def starved(rank: int, *, at_s: float, memory_bytes: int, node_rank: int = 0) -> EndReport:
        evidence = "out of memory: …"
        return EndReport(
            node_rank=node_rank,
            node_name="n",
            rank=rank,
            cause="signal 9",
            evidence=evidence,
            at_s=at_s,
            memory_bytes=memory_bytes,
        )

    small, large = starved(0, at_s=1, memory_bytes=400), starved(1, at_s=2, memory_bytes=900)
    elsewhere = starved(2, at_s=3, memory_bytes=5_000, node_rank=1)
    assert finder(small, large, elsewhere, own_failure(3, at_s=4)).verdict().rank == 1
    assert finder(own_failure(3, at_s=0.5), small, large).verdict().rank == 3, "it failed before memory ran out"


def test_a_rank_that_ended_normally_is_the_cause_if_errors_point_to_it() -> None:
    found = finder(consequence(0, at_s=1, peers=(1,)), consequence(2, at_s=1, peers=(1,)), ended(1, step=3))
    assert found.is_explained_by_end()
    verdict = found.verdict()
    assert verdict.rank == 1
    assert verdict.cause == "ended normally after 3 steps while ranks 0 and 2 waited in all_reduce #118"
    assert verdict.exit_code == 1


def test_an_end_explains_errors_that_point_nowhere_only_once_all_are_down() -> None:
    found = finder(consequence(0, at_s=1), ended(1), num_ranks=3)
    assert not found.is_explained_by_end()
    found.failures[2] = consequence(2, at_s=2)
    assert found.is_explained_by_end()
    assert found.verdict().rank == 1


def test_an_end_does_not_explain_errors_that_point_elsewhere() -> None:
    found = finder(consequence(0, at_s=1, peers=(2,)), ended(1))
    assert not found.is_explained_by_end()
    found.note_status(RankStatus(rank=2, stack=("  there",)))
    assert found.verdict().rank == 2


def test_an_exception_in_flight_is_the_cause_if_errors_point_to_its_rank() -> None:
    found = finder(consequence(0, at_s=1, peers=(1,)))
    raised = RaisedError(how="leaving", kind="KeyError", message="'x'", at_s=0.5)
    found.note_status(RankStatus(rank=1, raised=raised, pid=17))
    verdict = found.verdict()
    assert (verdict.rank, verdict.cause, verdict.pid) == (1, "KeyError: 'x'", 17)


def test_a_mismatch_that_a_backend_notices_is_the_fault_of_the_odd_rank() -> None:
    found = finder(own_failure(0, at_s=1, kind="TensorShapeMismatch"), num_ranks=3)
    for rank in range(3):
        one = SeenOperation(sequence=4, op="all_reduce", num_bytes=8 if rank == 2 else 80)
        found.note_status(RankStatus(rank=rank, groups={"0": GroupHistory(operations=(one,))}))
    verdict = found.verdict()
    assert verdict.rank == 2
    assert "rank 2 calls all_reduce of 8 bytes, ranks 0 and 1 call all_reduce of 80 bytes" in verdict.cause


def test_a_rank_that_never_came_is_the_cause_of_a_timeout() -> None:
    found = finder(num_ranks=2)
    call = WaitingCall(op="all_reduce", group="0", sequence=5, members=(0, 1), age_s=3)
    four = tuple(SeenOperation(sequence=number, op="all_reduce", num_bytes=8) for number in range(1, 5))
    five = (*four, SeenOperation(sequence=5, op="all_reduce", num_bytes=8, is_ended=False))
    found.note_status(RankStatus(rank=0, waiting=call, groups={"0": GroupHistory(operations=five)}))
    found.note_status(RankStatus(rank=1, groups={"0": GroupHistory(operations=four)}, stack=("  here",)))
    assert found.explain() is not None
    found.failures[0] = consequence(0, at_s=9, peers=(1,))
    verdict = found.verdict()
    assert verdict.rank == 1
    assert verdict.cause == "did not come to all_reduce #5, where rank 0 waited"
    assert verdict.stack == ("  here",)


def test_without_any_cause_the_first_consequence_is_reported() -> None:
    assert finder(consequence(2, at_s=2), consequence(1, at_s=1), num_ranks=3).verdict().rank == 1
