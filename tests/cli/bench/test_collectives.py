"""`torsh bench`: real ranks, real numbers, and refusals before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from torsh_distributed.cli.app import app
from torsh_distributed.errors import TorshError


def test_collectives_are_measured_on_every_backend_and_compared_with_the_last(tmp_path: Path) -> None:
    out = tmp_path / "timings.json"
    args = ["--backends", "auto,gloo", "--sizes", "1KB,1MB", "--rounds", "1", "--seconds", "0.02", "--json", str(out)]
    done = CliRunner().invoke(app, ["bench", "collectives", *args])
    assert done.exit_code == 0, done.output
    record = json.loads(out.read_text())
    assert [(row["num_ranks"], row["op"], row["num_bytes"]) for row in record["results"]] == [
        (2, "all_reduce", 2**10),
        (2, "all_reduce", 2**20),
    ]
    for row in record["results"]:
        assert {name: len(seconds) for name, seconds in row["seconds"].items()} == {"auto": 1, "gloo": 1}
        assert min(seconds for taken in row["seconds"].values() for seconds in taken) > 0
    assert "× gloo" in done.output


def test_compression_is_measured_on_local_ranks(tmp_path: Path) -> None:
    out = tmp_path / "timings.json"
    done = CliRunner().invoke(
        app, ["bench", "compression", "--methods", "none,int8", "--size", "1MB", "--json", str(out)]
    )
    assert done.exit_code == 0, done.output
    record = json.loads(out.read_text())
    none, int8 = record["results"]
    assert none["relative_error"] == 0
    assert 0 < int8["relative_error"] < 0.01
    assert none["sent_bytes"] == 2**20
    assert 3.8 < none["sent_bytes"] / int8["sent_bytes"] < 4.0
    assert all(row["average_s"] > 0 for row in record["results"])
    assert "int8" in done.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--methods", "int9"], "int9"),
        (["--size", "many"], "a size is a whole number"),
        (["--backend", "carrier-pigeon"], "carrier-pigeon"),
    ],
)
def test_what_cannot_be_measured_is_refused(args: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", "compression", *args])
    assert isinstance(done.exception, TorshError)
    assert message in str(done.exception)


def test_the_tables_need_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = CliRunner().invoke(app, ["bench", "compression", "--tables"])
    assert isinstance(done.exception, TorshError)
    assert "clone the repository" in str(done.exception)


def test_the_network_is_measured_look_by_look(tmp_path: Path) -> None:
    out = tmp_path / "network.json"
    args = ["bench", "network", "--backend", "gloo", "--looks", "2", "--sizes", "1KB,256KB", "--json", str(out)]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    looks = json.loads(out.read_text())["looks"]
    assert [list(look["all_reduce_s"]) for look in looks] == [["1024", "262144"]] * 2
    for look in looks:
        assert look["bytes_per_s"] > 0
        assert look["retransmitted"] is not None
    assert looks[1]["time_s"] > looks[0]["time_s"]


def test_a_network_of_an_unknown_backend_is_refused() -> None:
    done = CliRunner().invoke(app, ["bench", "network", "--backend", "carrier-pigeon"])
    assert isinstance(done.exception, TorshError)
    assert "carrier-pigeon" in str(done.exception)
