from __future__ import annotations

import base64
import itertools
import json
import math
import struct
import time
from typing import Any

import pytest

from tests.observe.packets import FakeRank, job_of_two
from torsh_distributed import events
from torsh_distributed.observe.job.job_view import MAX_INCIDENTS, JobView
from torsh_distributed.observe.job.page_state import page_state
from torsh_distributed.observe.job.training_curve import ThinnedSeries
from torsh_distributed.observe.metrics.step_record import StepRecord, pack_steps


def test_the_view_knows_every_rank_and_the_page_gets_json() -> None:
    view = job_of_two(10)
    state = page_state(view)
    assert json.loads(json.dumps(state, allow_nan=False)) == state
    assert state["job"]["state"] == "running"
    assert (state["job"]["step"], state["job"]["loss"]) == (10, pytest.approx(1.1))
    assert [rank["rank"] for rank in state["ranks"]] == [0, 1]
    assert state["ranks"][0]["wait_share"] == pytest.approx(1 / 3, rel=0.01)
    assert sum(state["parts"].values()) == pytest.approx(0.03, rel=0.01)
    assert state["curve"]["step"] == list(range(1, 11))
    assert state["operations"][0]["op"] == "all_reduce"
    assert state["operations"][0]["count"] == 20
    assert [row["rank"] for row in state["timeline"]] == [0, 1]


def test_shares_agree_wherever_they_are_shown_and_add_up_to_a_step() -> None:
    """Rank 0 measured the parts of its first two steps only, in which it waited more; rank 1 cannot tell waits."""
    view = JobView()
    split = {"forward_s": 0.2, "backward_s": 0.3, "optimizer_s": 0.1, "bubble_s": None, "data_s": 0.1}
    whole = {"forward_s": None, "backward_s": None, "optimizer_s": None, "bubble_s": None, "data_s": 0.1}
    first = [StepRecord(n, 100.0 + n, 1.0, **split, wait_s=0.2, other_s=0.1) for n in (1, 2)]
    rest = [StepRecord(n, 100.0 + n, 0.5, **whole, wait_s=0.05, other_s=0.35) for n in (3, 4, 5, 6)]
    blind = [StepRecord(n, 100.0 + n, 0.8, **whole | {"data_s": None}, wait_s=None, other_s=0.8) for n in range(1, 7)]
    for rank, steps in enumerate([[*first, *rest], blind]):
        view.take({"type": "metrics", "rank": rank, "seq": 1, "steps": pack_steps(steps)})
    state = page_state(view)
    one, other = state["ranks"]
    assert one["step_s"] == pytest.approx(4.0 / 6) == sum(one["parts"].values())
    assert one["wait_share"] == pytest.approx(0.6 / 4.0) == one["parts"]["wait"] / one["step_s"]
    assert one["data_share"] == pytest.approx(0.6 / 4.0) == one["parts"]["data"] / one["step_s"]
    assert one["busy_s"] == pytest.approx(2.8 / 6)
    assert one["parts"]["backward"] / one["busy_s"] == pytest.approx(0.3 / 0.7), "as in the steps that were looked at"
    assert (other["wait_share"], other["parts"]) == (None, {"other": pytest.approx(0.8)})
    assert sum(state["parts"].values()) == pytest.approx((one["step_s"] + other["step_s"]) / 2)


def test_the_first_step_does_not_set_the_scale_of_the_others() -> None:
    view = JobView()
    rank = FakeRank(0)
    rank.step(compute_s=30.0)
    for _ in range(5):
        rank.step(compute_s=0.02)
    view.take(rank.packet())
    curve = page_state(view)["curve"]
    assert curve["step"] == [1, 2, 3, 4, 5, 6]
    assert curve["samples_per_s"][0] is None
    assert curve["step_ms"][0] is None
    assert curve["samples_per_s"][1:] == pytest.approx([32 / 0.03] * 5, rel=0.01)
    assert curve["step_ms"][1:] == pytest.approx([30.0] * 5, rel=0.01)


@pytest.mark.parametrize(
    "garbage",
    [
        {},
        {"type": "metrics"},
        {"type": "metrics", "rank": -1},
        {"type": "metrics", "rank": True},
        {"type": "metrics", "rank": 10**9},
        {"type": "metrics", "rank": 0, "metrics": "x", "steps": 5, "marks": {}, "facts": [], "custom": None},
        {"type": "metrics", "rank": 0, "metrics": [["torsh_loss", [], math.nan], ["unknown", [], 1], [1, 2, 3], None]},
        {"type": "metrics", "rank": 0, "metrics": [["torsh_step_seconds", [], {"n": 1}], ["torsh_loss", ["x"], 1]]},
        {"type": "metrics", "rank": 0, "steps": [[1], ["a"] * 13, None]},
        {
            "type": "metrics",
            "rank": 0,
            "marks": [{"type": "evaluation", "time": 10**400, "step": "x", "loss": 10**400}],
        },
        {"type": "metrics", "rank": 0, "steps": "<b>not base64</b>"},
        {"type": "metrics", "rank": 0, "steps": base64.b64encode(struct.pack("<2d8f2d4f", *[math.inf] * 16)).decode()},
        {"type": "metrics", "rank": 0, "custom": [["<b>", "gauge", "", ""], ["torsh_custom_x", "bad", "", ""], 4]},
        {
            "type": "metrics",
            "rank": 0,
            "marks": ["x", {"type": 1}, {"time": 1, "type": "log", "message": "y" * 10_000}],
        },
        {"type": "metrics", "rank": 0, "time": 10**400, "clock": "x"},
        {"type": "job", "world_size": "many", "run_id": 5},
        {"type": "membership", "action": 5, "attempt": "x", "detail": []},
    ],
    ids=range(17),
)
def test_garbage_changes_nothing_and_raises_nothing(garbage: dict[str, object]) -> None:
    view = job_of_two(3)
    view.take(garbage)
    state = page_state(view)
    json.dumps(state, allow_nan=False)
    assert state["job"]["step"] == 3


def test_a_rank_whose_memory_fills_is_at_risk_while_it_runs_and_its_successor_is_not() -> None:
    view = JobView()

    def tell(number: int, used: int) -> list[dict[str, Any]]:
        facts = {"memory": {"host_used": used << 20, "host_limit": 1000 << 20}}
        told = {"type": "metrics", "sequence": number, "time": 1000.0 + 4 * number, "facts": facts}
        for rank in (0, 1):
            view.take({**told, "rank": rank} if rank else {**told, "rank": 0, "facts": {**facts, "memory": _STEADY}})
        found: list[dict[str, Any]] = page_state(view)["rank_risks"]
        return found

    scores = [tell(number, 100 + 20 * number) for number in range(35)]
    assert scores[10] == [], "140 s are left"
    (risk,) = scores[-1]
    assert (risk["rank"], risk["reason"]) == (1, "memory")
    assert risk["score"] > 0.7
    assert "memory grows by 5.0 MiB/s" in risk["detail"]
    assert [one["rank"] for one in view.incidents if one["type"] == "risk"] == [1], "told once"
    view.take({"type": "membership", "action": "restarted", "attempt": 1})
    assert page_state(view)["rank_risks"] == []
    for number in range(40, 50):
        assert tell(number, 100) == []


_STEADY = {"host_used": 100 << 20, "host_limit": 1000 << 20}


def test_a_rank_that_gets_slower_is_at_risk_before_the_others_suffer() -> None:
    view = JobView()
    for step in range(1, 121):
        for rank in (0, 1):
            own_s = 0.1 + (max(0, step - 40) * 0.002 if rank else 0.0)
            record = StepRecord(step, 1000.0 + step, own_s + 0.01, None, None, None, 0.01, None, None, own_s)
            view.take({"type": "metrics", "rank": rank, "sequence": step, "steps": pack_steps([record])})
    (risk,) = page_state(view)["rank_risks"]
    assert (risk["rank"], risk["reason"]) == (1, "slowing")


def test_what_is_no_use_of_memory_is_left_alone() -> None:
    view = JobView()
    for memory in ({"host_used": 10**400, "host_limit": 1}, {"host_used": 1}, {}, 3):
        view.take({"type": "metrics", "rank": 0, "sequence": 1, "time": 1.0, "facts": {"memory": memory}})
    assert page_state(view)["rank_risks"] == []


def test_memory_is_bounded() -> None:
    view = JobView()
    rank = FakeRank(0)
    for number in range(30):
        for _ in range(100):
            rank.step()
        packet = rank.packet()
        packet["marks"] = [{"type": "log", "time": 1.0, "message": "m", "n": number}] * 60
        view.take(packet)
    assert len(view.incidents) == MAX_INCIDENTS
    assert len(view.curve.points()) <= 1002
    assert view.curve.num_added == 3000
    assert view.curve.points()[-1].step == 3000
    assert len(view.ranks[0].steps) == 200


def test_a_thinned_series_keeps_both_ends_and_an_even_spread() -> None:
    series: ThinnedSeries[int] = ThinnedSeries(capacity=10)
    for number in range(1000):
        series.add(number)
    points = list(series.points())
    assert (points[0], points[-1]) == (0, 999)
    assert len(points) <= 12
    gaps = {after - before for before, after in itertools.pairwise(points[:-1])}
    assert len(gaps) == 1


def test_a_slow_rank_is_named_from_what_ranks_report() -> None:
    assert page_state(job_of_two(10))["stragglers"] == []
    (found,) = page_state(job_of_two(10, slowdown=1.5))["stragglers"]
    assert (found["rank"], found["slowdown"]) == (1, pytest.approx(0.5, abs=0.01))


def test_ranks_of_an_elastic_world_come_and_go() -> None:
    view = JobView()
    view.take({"type": "job", "run_id": "elastic", "world_size": None})
    view.take({"type": "membership", "action": "started", "attempt": 0, "world_size": 3})
    ranks = [FakeRank(number) for number in range(3)]
    for rank in ranks:
        rank.step()
        packet = rank.packet()
        packet["facts"]["world_size"] = 3
        view.take(packet)
    assert sorted(view.ranks) == [0, 1, 2]
    view.take({"type": "membership", "action": "lost", "world_size": 2, "detail": "worker 1: signal 9"})
    assert sorted(view.ranks) == [0, 1], "the numbers of the rest"
    view.take({"type": "membership", "action": "recovered", "world_size": 2, "detail": "regrouped"})
    values = view.job_values()
    assert values["torsh_world_size", ()] == 2
    assert values["torsh_ranks", ()] == 2
    assert values["torsh_failures", ()] == 1
    assert values["torsh_regroupings", ()] == 1
    assert view.header.attempt == 0
    for rank in ranks:
        rank.step()
        packet = rank.packet()
        packet["facts"]["world_size"] = 3
        view.take({"type": "membership", "action": "recovered", "world_size": 3})
        view.take(packet)
    assert sorted(view.ranks) == [0, 1, 2]
    assert page_state(view)["job"]["world_size"] == 3


def test_epochs_evaluations_and_the_time_that_is_left_are_shown_and_exported() -> None:
    view, rank = JobView(), FakeRank(0)
    rank.step(compute_s=30.0, wait_s=0.0)  # the start-up is no pace
    for _ in range(9):
        rank.step(compute_s=0.02, wait_s=0.01)
    rank.collector.take(events.StepEvent(step=11, duration_s=0.03, loss=1.0, epoch=2, grad_norm=math.inf), now_s=131.0)
    for step, loss in ((5, 2.5), (10, 2.25), (11, math.inf)):
        rank.collector.take(events.EvaluationEvent(step=step, loss=loss, duration_s=0.1), now_s=131.0)
    rank.collector.metrics("torsh_gpu_utilization_ratio", "0").record(0.5)
    rank.collector.metrics("torsh_gpu_utilization_ratio", "1").record(1.0)
    rank.collector.metrics("torsh_device_memory_fragmentation_ratio").record(0.125)
    packet = rank.packet()
    packet["facts"] |= {"world_size": 1, "total_steps": 111}
    view.take(packet)
    state = page_state(view)
    json.dumps(state, allow_nan=False)
    job, curve = state["job"], state["curve"]
    assert (job["epoch"], job["planned_steps"], job["validation_loss"], job["gpu_utilization"]) == (2, 111, 2.25, 0.75)
    assert (curve["validation_step"], curve["validation_loss"]) == ([5, 10], [2.5, 2.25])
    assert state["ranks"][0]["fragmentation"] == 0.125
    pace_s = sum(step.step_s for step in list(view.ranks[0].steps)[1:]) / 10
    values = view.job_values()
    assert job["remaining_s"] == values["torsh_remaining_seconds", ()] == pytest.approx(100 * pace_s)
    assert values["torsh_planned_steps", ()] == 111
    assert view.ranks[0].number("torsh_epoch") == 2
    assert view.curve.points()[-1].grad_norm is None, "overflowed"
    assert view.curve.points()[1].learning_rate == pytest.approx(0.1)
    view.take({"type": "membership", "action": "ended", "exit_code": 0})
    assert page_state(view)["job"]["remaining_s"] is None


def test_a_rank_that_fell_silent_is_shown_as_such() -> None:
    view = job_of_two(3)
    now_s = time.monotonic()
    assert [rank["is_silent"] for rank in page_state(view, now_s=now_s)["ranks"]] == [False, False]
    assert [rank["is_silent"] for rank in page_state(view, now_s=now_s + 11)["ranks"]] == [True, True]
    view.take({"type": "membership", "action": "ended", "exit_code": 0})
    assert [rank["is_silent"] for rank in page_state(view, now_s=now_s + 11)["ranks"]] == [False, False]


def test_a_running_job_is_judged_by_its_newest_steps() -> None:
    found = page_state(job_of_two(20, slowdown=1.5))
    imbalance = next(one for one in found["bottlenecks"] if one["kind"] == "load imbalance")
    assert imbalance["ranks"] == [1]
    assert "rank 1 comes last to 100%" in imbalance["evidence"]
    assert found["recommendations"][0]["title"].startswith("make rank 1 as fast")
    assert found["recommendations"][0]["gain_s"] == pytest.approx(0.01)
    assert [row["rank"] for row in found["waits"]] == [1, 0]
    assert found["waits"][0]["delays_s"] == pytest.approx(0.01)
    assert page_state(job_of_two(3))["recommendations"] == [], "three steps say little"


def test_the_timeline_is_of_one_step_though_ranks_tell_of_theirs_at_different_moments() -> None:
    view = JobView()
    ranks = [FakeRank(0), FakeRank(1)]
    for number in range(1, 10):
        for rank in ranks:
            rank.step()
        if number == 7:
            view.take(ranks[0].packet())  # steps 1 to 7
    view.take(ranks[1].packet())  # steps 1 to 9
    assert (view.ranks[0].timelines.keys(), view.ranks[1].timelines.keys()) == ({4}, {8})
    view.take(ranks[0].packet())  # steps 8 and 9
    rows = page_state(view)["timeline"]
    assert max(start for row in rows for _, start, _ in row["spans"]) < 0.03, "both are of step 8"
