"""Why a run is slow: known runs, and what is found in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.observe.trace.recorded import EventWriter, write_run
from torsh_distributed.cli.trace.trace_commands import recommendation_lines
from torsh_distributed.errors import IoError
from torsh_distributed.observe.bottlenecks.bottleneck import BottleneckType, analyse
from torsh_distributed.observe.bottlenecks.recommendation import recommend


def kinds(folder: Path) -> dict[BottleneckType, float]:
    return {one.kind: one.share for one in analyse(folder).bottlenecks}


def test_the_parts_of_a_step_add_up(tmp_path: Path) -> None:
    write_run(tmp_path, data_s=0.02, compute_s={1: 0.07})
    found = analyse(tmp_path)
    assert found.step_s == pytest.approx(0.1)
    assert sum(found.parts.values()) == pytest.approx(0.1, rel=1e-3)
    assert found.parts["data"] == pytest.approx(0.02)
    assert found.parts["compute"] == pytest.approx(0.06), "the mean of 50 and 70 ms"
    assert found.parts["sync"] == pytest.approx(0.01, rel=0.1), "rank 0 waits 20 ms, rank 1 not at all"
    assert found.parts["transfer"] == pytest.approx(0.01, rel=0.1)


def test_a_slow_rank_is_named_with_what_it_costs(tmp_path: Path) -> None:
    write_run(tmp_path, num_ranks=4, compute_s={2: 0.09})
    found = analyse(tmp_path)
    (late,) = [one for one in found.bottlenecks if one.kind is BottleneckType.LOAD_IMBALANCE]
    assert late.ranks == (2,)
    assert "its compute takes 40.0 ms longer" in late.evidence
    assert late.confidence > 0.9
    best = recommend(found)[0]
    assert "rank 2" in best.title
    assert best.gain_s == pytest.approx(0.04, rel=0.01), "the others need 50 ms, it needs 90"


def test_operations_under_way_together_count_one_delay_once(tmp_path: Path) -> None:
    for rank in range(2):
        writer = EventWriter(tmp_path, rank)
        for step in range(12):
            begin_s = 1000.0 + 0.1 * step
            for bucket in range(3):  # rank 1 begins each 40 ms later, and rank 0 waits for all of them at once
                start_s = begin_s + 0.001 * bucket + 0.04 * rank
                facts = {"op": "all_reduce", "group": "0", "sequence": 3 * step + bucket, "num_bytes": 1 << 20}
                writer.add("collective", start_s, begin_s + 0.09 - start_s, **facts)
            writer.add("phase", begin_s, 0.04, phase="backward", thread=1)
            writer.add(
                "wait", begin_s + 0.04, 0.05, num_started=3, num_bytes=3 << 20, op="all_reduce", group="0", thread=1
            )
            writer.add("step", begin_s, 0.1, timed=False, step=step + 1)
        writer.write()
    late = analyse(tmp_path).arrivals
    assert late.delay_s[1] / 11 == pytest.approx(0.042, rel=0.01), "42 ms of each step, not three times 40"


def test_waiting_for_another_stage_is_a_bubble_and_no_communication(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path, 0)
    for step in range(12):
        begin_s = 1000.0 + 0.1 * step
        writer.add("phase", begin_s, 0.04, phase="stage", thread=1)
        facts = {"op": "recv", "group": "pp", "num_started": 1, "num_bytes": 64, "thread": 1}
        writer.add("wait", begin_s + 0.04, 0.03, **facts)
        writer.add("phase", begin_s, 0.09, phase="schedule", thread=1)
        writer.add("step", begin_s, 0.1, timed=False, step=step + 1)
    writer.write()
    parts = analyse(tmp_path).parts
    assert parts["compute"] == pytest.approx(0.04)
    assert parts["bubble"] == pytest.approx(0.05), "20 ms before and after the stage, 30 ms for another one"
    assert parts["transfer"] + parts["sync"] == pytest.approx(0.0)
    assert parts["other"] == pytest.approx(0.01)


def test_nobody_is_named_when_ranks_are_equal(tmp_path: Path) -> None:
    write_run(tmp_path, num_ranks=4)
    found = analyse(tmp_path)
    assert found.arrivals.straggler is None
    assert BottleneckType.LOAD_IMBALANCE not in kinds(tmp_path)
    assert found.bottlenecks[0].kind is BottleneckType.COMPUTE


def test_loading_and_transfer_are_found_and_their_gains_follow_from_the_numbers(tmp_path: Path) -> None:
    write_run(tmp_path / "loading", data_s=0.06)
    assert kinds(tmp_path / "loading")[BottleneckType.IO] == pytest.approx(0.5, rel=0.01)
    advice = recommend(analyse(tmp_path / "loading"))
    assert advice[0].gain_s == pytest.approx(0.06), "two processes load a batch in 30 ms each, beside 60 ms of the rest"
    assert advice[0].overrides == {"TORSH_LOADER_WORKERS": "2"}
    write_run(tmp_path / "much loading", data_s=0.6)
    advice = recommend(analyse(tmp_path / "much loading"))
    assert "num_workers=8" in advice[0].title
    assert advice[0].gain_s == pytest.approx(0.66 - 0.6 / 8), "loading still sets the pace"
    write_run(tmp_path / "sending", transfer_s=0.05)
    assert kinds(tmp_path / "sending")[BottleneckType.COMMUNICATION] == pytest.approx(0.5, rel=0.01)
    int8 = next(one for one in recommend(analyse(tmp_path / "sending")) if "int8" in one.title)
    assert int8.gain_s == pytest.approx(0.05 * (1 - (1 + 4 / 256) / 4), rel=0.01)
    assert int8.plan_change == '[compress]\nmethod = "int8"'


def test_advice_on_communication_is_about_what_was_seen(tmp_path: Path) -> None:
    write_run(tmp_path, transfer_s=0.05, num_small=20, num_samples=64)
    found = analyse(tmp_path)
    assert found.arrivals.latency_s == pytest.approx(0.001, rel=0.01)
    advice = {one.title: one for one in recommend(found)}
    larger = advice["update after 128 samples, in twice as many passes"]
    assert larger.plan_change == "[training]\nbatch_size = 128\ngradient_accumulation = 2"
    assert larger.gain_s == pytest.approx(found.parts["transfer"] / 2)
    fewer = advice["send fewer, larger messages"]
    assert fewer.gain_s == pytest.approx(0.019, rel=0.01), "19 of 21 operations, a millisecond each"


def test_what_follows_from_nothing_measured_has_no_gain(tmp_path: Path) -> None:
    write_run(tmp_path, num_passes=8)
    (advice,) = recommend(analyse(tmp_path))
    assert advice.gain_s is None
    assert advice.overrides == {"TORSH_PLAN__TRAINING__GRADIENT_ACCUMULATION": "4"}
    (line, *_) = recommendation_lines([advice], 0.06)
    assert (
        line
        == "1. do a batch in 4 passes, not in 8: gain unknown before `torsh tune` has measured it (confidence 1.00)"
    )


def test_few_steps_give_little_confidence(tmp_path: Path) -> None:
    write_run(tmp_path, num_steps=3, data_s=0.06)
    assert all(one.confidence <= 0.2 for one in analyse(tmp_path).bottlenecks)


def test_a_run_without_steps_is_an_error(tmp_path: Path) -> None:
    write_run(tmp_path, num_steps=1)
    with pytest.raises(IoError, match="no steps"):
        analyse(tmp_path)


def test_what_a_run_did_without_is_named_with_its_gain(tmp_path: Path) -> None:
    write_run(tmp_path)
    compiled = {"title": "compile the layers", "gain": 0.2, "plan_change": "[compile]\nenabled = true"}
    fused = {"title": "fused AdamW", "gain_s": 0.003, "plan_change": ""}
    with (tmp_path / "rank-0.jsonl").open("a") as file:
        for facts in (compiled, fused):
            event = {"time": 1000.0, "rank": 0, "type": "suggestion", "evidence": "1.25 times on an H200", **facts}
            file.write(json.dumps(event) + "\n")
    advice = {one.title: one for one in recommend(analyse(tmp_path))}
    assert advice["compile the layers"].gain_s == pytest.approx(0.012), "a fifth of 60 ms"
    assert advice["compile the layers"].overrides == {"TORSH_PLAN__COMPILE__ENABLED": "true"}
    assert advice["fused AdamW"].gain_s == pytest.approx(0.003)
    text = "\n".join(recommendation_lines(advice.values(), 0.06))
    assert "compile the layers: 12.00 ms a step, 20%" in text
    assert "1.25 times on an H200" in text
