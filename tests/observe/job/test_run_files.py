from __future__ import annotations

import json
from pathlib import Path

import pytest

from torsh_distributed import events
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.observe.job.page_state import page_state
from torsh_distributed.observe.job.run_comparison import compare_runs
from torsh_distributed.observe.job.run_files import EventFiles, event_of


def write_run(folder: Path, *, num_steps: int = 20, step_s: float = 0.03, wait_s: float = 0.01) -> Path:
    """Two ranks' event files, on a clock 1000 s behind the wall clock."""
    folder.mkdir()
    for rank in range(2):
        lines = [events.to_record(events.MembershipEvent(action="joined", world_size=2, rank=rank, time=999.0))]
        for step in range(num_steps):
            start = step * step_s
            wait = events.WaitEvent(
                op="all_reduce", group="0", num_started=1, num_bytes=64, start_s=start + 0.01, duration_s=wait_s
            )
            spans = [wait, events.PhaseEvent(phase="backward", start_s=start, duration_s=step_s)]
            done = events.StepEvent(step=step + 1, loss=1 / (step + 1), duration_s=step_s, num_samples=8)
            for event in (*spans, done):
                record = {**events.to_record(event), "rank": rank}
                end = record["start_s"] + record["duration_s"] if "start_s" in record else start + step_s
                lines.append({**record, "time": 1000.0 + end})
        (folder / f"rank-{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ended = events.MembershipEvent(action="ended", world_size=2, detail="exit code 0", time=1002.0)
    (folder / "launcher-77.jsonl").write_text(json.dumps(events.to_record(ended)) + "\n")
    return folder


def test_a_finished_run_is_shown_as_it_was(tmp_path: Path) -> None:
    state = page_state(EventFiles(write_run(tmp_path / "run")).read_all())
    assert state["job"]["state"] == "finished"
    assert (state["job"]["started"], state["job"]["age_s"]) == (999.0, 3.0)
    assert (state["job"]["step"], state["job"]["loss"]) == (20, pytest.approx(0.05))
    assert [rank["rank"] for rank in state["ranks"]] == [0, 1]
    assert state["ranks"][1]["step_s"] == pytest.approx(0.03, abs=1e-6)
    assert state["ranks"][1]["wait_share"] == pytest.approx(1 / 3, rel=1e-3)
    assert state["ranks"][1]["memory"] is None, "no event tells it"
    assert state["operations"][0]["count"] == 40


def test_a_growing_file_is_followed_and_garbage_is_counted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=3)
    path = folder / "rank-0.jsonl"
    whole = path.read_text()
    path.write_text("not json\n" + '{"type": "step", "duration_s": "x", "step": 1}\n[]\n' + whole[:-40])
    files = EventFiles(folder)
    files.poll()
    assert page_state(files.view)["job"]["step"] == 2, "the last line is not whole yet"
    with path.open("a") as file:
        file.write(whole[-40:])
    assert files.poll()
    assert not files.poll()
    assert page_state(files.view)["job"]["step"] == 3
    assert files.view.num_dropped == 3


def test_only_events_become_events() -> None:
    assert isinstance(
        event_of({"type": "log", "level": "info", "message": "m", "time": 1.0, "rank": 0}), events.LogEvent
    )
    for bad in (None, [], {"type": "nothing"}, {"type": "step"}, {"type": "log", "level": 1, "message": "m"}):
        assert event_of(bad) is None
    energy = {
        "type": "energy",
        "time": 1.0,
        "rank": -1,
        "node": 0,
        "meter": "cpu",
        "source": "rapl",
        "is_measured": True,
    }
    energy |= {"joules": 5.0, "duration_s": 1.0}
    assert isinstance(event_of({**energy, "ranks": [0, 1]}), events.EnergyEvent)
    for ranks in (3, "3", [[0]], {"0": 1}):
        assert event_of({**energy, "ranks": ranks}) is None


def test_pushes_and_pulls_are_read_back() -> None:
    pushed = events.ParameterEvent(operation="push", version=3, num_bytes=4, duration_s=0.1)
    assert event_of(json.loads(json.dumps(events.to_record(pushed)))) == pushed


def test_no_directory_is_an_error_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="no such directory of event files"):
        EventFiles(tmp_path / "absent")


def test_a_traced_run_files_that_were_set_aside_and_a_directory_without_any(tmp_path: Path) -> None:
    whole = write_run(tmp_path / "run", num_steps=6)
    traced = tmp_path / "out" / "events"
    traced.parent.mkdir()
    whole.rename(traced)
    lines = (traced / "rank-0.jsonl").read_text().splitlines(keepends=True)
    (traced / "rank-0.older.jsonl").write_text("".join(lines[:10]))
    (traced / "rank-0.jsonl").write_text("".join(lines[10:]))
    files = EventFiles(tmp_path / "out")
    state = page_state(files.read_all())
    assert state["job"]["run_id"] == "out"
    assert state["curve"]["step"] == [1, 2, 3, 4, 5, 6]
    (traced / "rank-0.jsonl").rename(traced / "rank-0.older.jsonl")
    (traced / "rank-0.jsonl").write_text(lines[-1].replace('"step": 6', '"step": 7'))
    assert files.poll()
    assert page_state(files.view)["job"]["step"] == 7, "a file that is started again is read from its start"
    (tmp_path / "nothing").mkdir()
    with pytest.raises(InvalidArgument, match="no event files in this directory"):
        EventFiles(tmp_path / "nothing").read_all()


def test_two_runs_are_compared_with_their_scatter(tmp_path: Path) -> None:
    one = EventFiles(write_run(tmp_path / "a")).read_all()
    other = EventFiles(write_run(tmp_path / "b", step_s=0.06, wait_s=0.04)).read_all()
    rows = {row.what: row for row in compare_runs(one, other)}
    assert rows["step time"].difference == "+100.0%"
    assert rows["wait"].difference == "+300.0%"
    assert rows["loss at the end"].difference == "within noise"
    assert rows["ranks"].show(rows["ranks"].first) == "2"
    assert "data" not in rows or rows["data"].first is not None
