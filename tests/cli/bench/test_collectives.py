"""`torsh bench collectives`: real ranks, real numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from torsh_distributed.cli.app import app

pytestmark = pytest.mark.ranks


@pytest.mark.matrix
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
