"""The timeline: all ranks on one clock, collectives linked, bounded, profiles joined."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.observe.trace.recorded import write_run
from torsh_distributed.errors import IoError
from torsh_distributed.observe.trace.event_files import align_clocks, read_run
from torsh_distributed.observe.trace.trace_file import write_trace


def events_of(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return found


def test_ranks_are_on_one_clock_and_collectives_are_linked(tmp_path: Path) -> None:
    write_run(tmp_path / "events", num_ranks=3, compute_s={2: 0.07})
    (tmp_path / "events" / "launcher-7.jsonl").write_text(
        json.dumps({"time": 1000.5, "rank": -1, "type": "membership", "action": "lost", "world_size": 3}) + "\n"
    )
    written = write_trace(tmp_path, tmp_path / "trace.json")
    assert (written.num_ranks, written.num_links, written.num_dropped) == (3, 12, 0)
    events = events_of(tmp_path / "trace.json")
    reduces = [one for one in events if one["ph"] == "X" and one["name"] == "all_reduce" and one["tid"] == 2]
    by_number: dict[int, dict[int, dict[str, Any]]] = {}
    for one in reduces:
        by_number.setdefault(one["args"]["sequence"], {})[one["pid"]] = one
    for together in by_number.values():
        ends = [one["ts"] + one["dur"] for one in together.values()]
        assert max(ends) - min(ends) < 1, "they leave it together"
        assert together[2]["ts"] - together[0]["ts"] == pytest.approx(20_000, abs=1)
    arrows = [one for one in events if one.get("id") == 0]
    assert sorted(one["ph"] for one in arrows) == ["f", "s", "t"]
    assert next(one["pid"] for one in arrows if one["ph"] == "f") == 2, "the arrow ends where the last rank came"
    for arrow in arrows:
        (around,) = [
            one for one in reduces if one["pid"] == arrow["pid"] and one["ts"] <= arrow["ts"] <= one["ts"] + one["dur"]
        ]
        assert around["args"]["sequence"] == 1
    assert any(one["ph"] == "i" and one["name"] == "membership: lost" for one in events)
    names = {one["args"]["name"] for one in events if one["name"] == "process_name"}
    assert names == {"rank 0", "rank 1", "rank 2", "launcher"}


def test_clocks_of_other_machines_are_corrected_from_the_collectives(tmp_path: Path) -> None:
    write_run(tmp_path, compute_s={1: 0.06}, skews_s={1: 3.0})
    clocks = align_clocks(read_run(tmp_path))
    assert clocks.skews_s[1] == pytest.approx(3.0, abs=clocks.error_s)
    assert clocks.error_s < 0.02, "not more than the shortest collective"


def test_the_limit_keeps_steps_and_the_longest_slices(tmp_path: Path) -> None:
    write_run(tmp_path, num_steps=300)
    written = write_trace(tmp_path, tmp_path / "small.json", limit_mb=0.2)
    assert written.num_dropped > 0
    assert (tmp_path / "small.json").stat().st_size < 0.5 * 2**20
    steps = [one for one in events_of(tmp_path / "small.json") if one["ph"] == "X" and one["tid"] == 0]
    assert len(steps) == 600


def test_a_profile_of_torch_is_joined_at_its_place(tmp_path: Path) -> None:
    write_run(tmp_path / "events")
    profile = {
        "baseTimeNanoseconds": 1000 * 10**9,
        "distributedInfo": {"rank": 1},
        "traceEvents": [{"ph": "X", "name": "aten::mm", "pid": 5, "tid": 5, "ts": 10_000.0, "dur": 5.0}],
    }
    with gzip.open(tmp_path / "r1.pt.trace.json.gz", "wt") as file:
        json.dump(profile, file)
    assert write_trace(tmp_path, tmp_path / "trace.json").num_profiles == 1
    (found,) = [one for one in events_of(tmp_path / "trace.json") if one["name"] == "aten::mm"]
    assert found["pid"] == 1
    assert found["ts"] == pytest.approx(10_000.0, abs=1)


def test_damaged_lines_are_counted_and_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    write_run(tmp_path)
    with (tmp_path / "rank-0.jsonl").open("a") as file:
        file.write('{"time": 1, "ty\n[]\n"x"\n')
    assert read_run(tmp_path).num_damaged == 3
    (tmp_path / "empty").mkdir()
    with pytest.raises(IoError, match="no events"):
        read_run(tmp_path / "empty")
