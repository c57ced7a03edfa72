from __future__ import annotations

import json
import socket
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.cli.test_app import torsh
from torsh_distributed.errors import CommunicationError, InvalidArgument
from torsh_distributed.green.carbon.feeds import make_feed
from torsh_distributed.green.schedule.allocation import JobShape
from torsh_distributed.green.schedule.run_times import read_deadline, recommend

NOW = 1_800_000_000.0


def test_a_deadline_is_a_span_or_a_time_ahead() -> None:
    assert read_deadline("96h", now=NOW) == NOW + 96 * 3600
    assert read_deadline("1.5d", now=NOW) == NOW + 36 * 3600
    assert read_deadline("2027-01-20T00:00Z", now=NOW) > NOW
    for text, match in (("2020-01-01T00:00Z", "in the past"), ("soon", "not a time")):
        with pytest.raises(InvalidArgument, match=match):
            read_deadline(text, now=NOW)


def test_the_command_says_when_to_run_and_what_it_saves(tmp_path: Path) -> None:
    now = time.time()
    rows = [(now + 3600 * hour, 100 if 6 <= hour < 12 else 400) for hour in range(-1, 30)]
    trace = tmp_path / "trace.csv"
    lines = [f"{datetime.fromtimestamp(start, UTC).isoformat()},{grams}" for start, grams in rows]
    trace.write_text("time,g_per_kwh\n" + "\n".join(lines) + "\n")
    done = torsh("green", "when", "--file", str(trace), "--deadline", "24h", "--hours", "4", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["action"] == "defer"
    assert told["saved_share"] == pytest.approx(0.75, abs=0.02)
    (window,) = told["windows"]
    assert window["g_per_kwh"] == pytest.approx(100.0)
    assert window["hours"] == pytest.approx(4.0)
    assert window["renewable_share"] is None, "the file does not tell it"
    late = torsh("green", "when", "--file", str(trace), "--deadline", "2h", "--hours", "4")
    assert late.returncode == 1
    assert "the job takes 4.0 h with 1 worker and the deadline is in 2.0 h" in late.stderr


def test_times_with_much_renewable_power_are_listed_best_first(tmp_path: Path) -> None:
    begin = NOW - NOW % 3600
    shares = [0.3, 0.5, 0.7, 0.4, 0.2, 0.9, 0.1]
    lines = [
        f"{datetime.fromtimestamp(begin + 3600 * hour, UTC).isoformat()},{200 - 100 * share},{share}"
        for hour, share in enumerate((*shares, 0.1))
    ]
    (tmp_path / "trace.csv").write_text("time,g_per_kwh,renewable_share\n" + "\n".join(lines) + "\n")
    feed = make_feed("file", zone=None, file=str(tmp_path / "trace.csv"), url=None, g_per_kwh=None)
    found = recommend(JobShape(work_h=1.0), feed, now=begin, until=begin + 7 * 3600)
    rows = found.to_dict()["renewable_windows"]
    assert [row["hours"] for row in rows] == pytest.approx([1.0, 2.0]), "40 % is not more than 40 %"
    assert [row["renewable_share"] for row in rows] == pytest.approx([0.9, 0.6])
    assert [row["g_per_kwh"] for row in rows] == pytest.approx([110.0, 140.0])
    first = datetime.fromtimestamp(begin + 5 * 3600, UTC).strftime("%Y-%m-%dT%H:%MZ")
    assert f"90% renewable from {first} to " in found.in_words()
    more = recommend(JobShape(work_h=1.0), feed, now=begin, until=begin + 7 * 3600, renewable_above=0.8)
    assert len(more.to_dict()["renewable_windows"]) == 1


def test_a_feed_that_is_down_is_said_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    feed = make_feed("gb", zone="GB", file=None, url=f"http://127.0.0.1:{port}", g_per_kwh=None)
    with pytest.raises(CommunicationError, match="cannot be reached") as caught:
        recommend(JobShape(work_h=4.0), feed, now=NOW, until=NOW + 86400)
    assert "--file" in str(caught.value)


def test_a_file_that_is_not_there_or_not_understood_is_named_in_one_sentence(tmp_path: Path) -> None:
    def asked(name: str) -> None:
        feed = make_feed("file", zone=None, file=str(tmp_path / name), url=None, g_per_kwh=None)
        recommend(JobShape(work_h=4.0), feed, now=NOW, until=NOW + 86400)

    with pytest.raises(InvalidArgument, match=r"none\.csv cannot be read: No such file"):
        asked("none.csv")
    (tmp_path / "odd.csv").write_text("time,g_per_kwh\nyesterday,100\n")
    with pytest.raises(InvalidArgument, match="this is not a time") as caught:
        asked("odd.csv")
    assert str(caught.value).count("hint:") == 1
    assert "line=2" in str(caught.value)
    (tmp_path / "percent.csv").write_text("time,g_per_kwh,renewable_share\n2026-11-18T16:00Z,100,45\n")
    with pytest.raises(InvalidArgument, match="from 0 to 1, not 45"):
        asked("percent.csv")


def test_values_that_cannot_be_true_are_counted_in_the_answer(tmp_path: Path) -> None:
    begin = NOW - NOW % 3600
    rows = [(begin + 3600 * hour, 1e9 if hour == 5 else 200) for hour in range(30)]
    lines = [f"{datetime.fromtimestamp(start, UTC).isoformat()},{grams}" for start, grams in rows]
    (tmp_path / "trace.csv").write_text("time,g_per_kwh\n" + "\n".join(lines) + "\n")
    feed = make_feed("file", zone=None, file=str(tmp_path / "trace.csv"), url=None, g_per_kwh=None)
    found = recommend(JobShape(work_h=2.0), feed, now=begin + 60, until=begin + 4 * 3600)
    assert "cannot be true and are left out: 1" in found.in_words()
    (tmp_path / "trace.csv").write_text("time,g_per_kwh\n" + lines[5] + "\n")
    with pytest.raises(InvalidArgument, match="left out as impossible: 1"):
        recommend(JobShape(work_h=2.0), feed, now=begin + 6 * 3600, until=begin + 9 * 3600)


def test_a_deadline_in_the_past_is_refused_by_both_commands_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("time,g_per_kwh\n2026-01-01T00:00Z,100\n")
    done = torsh("green", "when", "--file", str(tmp_path / "trace.csv"), "--deadline", "2020-01-01")
    assert done.returncode == 1
    assert "deadline is in the past" in done.stderr
    (tmp_path / "train.py").write_text("raise SystemExit('it was started')\n")
    (tmp_path / "plan.toml").write_text(
        '[green]\nenabled = true\ncarbon = "gb"\nstrategy = "minimize_carbon"\ndeadline = "2020-01-01"\n'
    )
    done = torsh("run", "--plan", str(tmp_path / "plan.toml"), str(tmp_path / "train.py"))
    assert done.returncode == 1
    assert "deadline is in the past" in done.stderr
    assert "it was started" not in done.stderr
