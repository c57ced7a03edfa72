from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torsh_distributed.checkpoint.save_policy import EXIT_CODE
from torsh_distributed.launch.local.end_report import EndReport
from torsh_distributed.launch.local.exit_causes import SAVED_EXIT_CODE
from torsh_distributed.launch.nodes.coordinator import Coordinator, Decision, JobPhase, StartAttempt
from torsh_distributed.launch.nodes.records import End, Stop


def failure(node_rank: int = 0, exit_code: int = 3) -> EndReport:
    return EndReport(node_rank=node_rank, node_name="n", rank=node_rank, exit_code=exit_code, cause="c")


def running(num_nodes: int, max_restarts: int = 0) -> Coordinator:
    coordinator = Coordinator(num_nodes=num_nodes, max_restarts=max_restarts)
    for node_rank in range(num_nodes):
        decisions = coordinator.joined(node_rank)
    assert decisions == [StartAttempt(0)]
    return coordinator


def test_the_last_node_to_join_starts_the_job() -> None:
    coordinator = Coordinator(num_nodes=3, max_restarts=0)
    assert coordinator.joined(2) == []
    assert coordinator.absent == [0, 1]
    assert coordinator.joined(0) == []
    assert coordinator.joined(1) == [StartAttempt(0)]


def test_the_job_is_over_when_every_node_finished() -> None:
    coordinator = running(2)
    assert coordinator.finished(0, 0) == []
    assert coordinator.finished(1, 0) == [End(exit_code=0)]
    assert coordinator.phase is JobPhase.OVER


def test_a_failure_without_restarts_ends_the_job_with_its_exit_code() -> None:
    first = failure(1, exit_code=137)
    coordinator = running(2)
    assert coordinator.failed(0, first) == [End(exit_code=137, failure=first)]
    assert coordinator.failed(0, failure(0)) == []


def test_a_failure_with_restarts_stops_all_nodes_and_the_last_to_stop_starts_the_next_attempt() -> None:
    first = failure(1)
    coordinator = running(2, max_restarts=1)
    assert coordinator.failed(0, first) == [Stop(attempt=0, failure=first)]
    assert coordinator.failed(0, failure(0)) == []
    assert coordinator.unstopped == [0, 1]
    assert coordinator.stopped(1, 0) == []
    assert coordinator.stopped(0, 0) == [StartAttempt(1)]
    assert coordinator.failed(1, first) == [End(exit_code=3, failure=first)]
    assert coordinator.failures == [first, first]


def test_workers_that_saved_and_ended_on_a_signal_are_not_started_again() -> None:
    ended = failure(exit_code=SAVED_EXIT_CODE)
    assert running(1, max_restarts=3).failed(0, ended) == [End(exit_code=75, failure=ended)]
    assert SAVED_EXIT_CODE == EXIT_CODE


def test_reports_on_an_earlier_attempt_change_nothing() -> None:
    coordinator = running(1, max_restarts=1)
    coordinator.failed(0, failure())
    coordinator.stopped(0, 0)
    assert coordinator.failed(0, failure()) == []
    assert coordinator.finished(0, 0) == []
    assert coordinator.stopped(0, 0) == []
    assert coordinator.finished(0, 1) == [End(exit_code=0)]


def test_a_node_that_finished_before_another_failed_is_started_again_too() -> None:
    coordinator = running(2, max_restarts=1)
    coordinator.finished(0, 0)
    coordinator.failed(0, failure(1))
    coordinator.stopped(0, 0)
    assert coordinator.stopped(1, 0) == [StartAttempt(1)]
    assert coordinator.finished(0, 1) == []


def test_a_lost_node_ends_the_job_at_any_time() -> None:
    lost = failure(1, exit_code=1)
    for coordinator in (Coordinator(num_nodes=2, max_restarts=5), running(2, max_restarts=5)):
        assert coordinator.lost(lost) == [End(exit_code=1, failure=lost)]
        assert coordinator.lost(lost) == []


def test_a_signal_ends_the_job_with_128_plus_its_number() -> None:
    assert running(2).interrupted(15) == [End(exit_code=143, signal=15)]


REPORTS = st.tuples(
    st.sampled_from(["joined", "failed", "finished", "stopped", "lost", "interrupted"]),
    st.integers(0, 2),
    st.integers(0, 3),
)


@given(reports=st.lists(REPORTS, max_size=60), max_restarts=st.integers(0, 2))
def test_whatever_nodes_report_attempts_count_up_and_the_end_comes_once(
    reports: list[tuple[str, int, int]], max_restarts: int
) -> None:
    coordinator = Coordinator(num_nodes=3, max_restarts=max_restarts)
    decisions: list[Decision] = []
    for what, node_rank, attempt in reports:
        match what:
            case "joined":
                decisions += coordinator.joined(node_rank)
            case "failed":
                decisions += coordinator.failed(attempt, failure(node_rank))
            case "finished":
                decisions += coordinator.finished(node_rank, attempt)
            case "stopped":
                decisions += coordinator.stopped(node_rank, attempt)
            case "lost":
                decisions += coordinator.lost(failure(node_rank))
            case "interrupted":
                decisions += coordinator.interrupted(2)
    begun = [decision.attempt for decision in decisions if isinstance(decision, StartAttempt)]
    assert begun == list(range(len(begun)))
    assert len(begun) <= max_restarts + 1
    ends = [index for index, decision in enumerate(decisions) if isinstance(decision, End)]
    assert ends in ([], [len(decisions) - 1])
    assert (coordinator.phase is JobPhase.OVER) == bool(ends)
