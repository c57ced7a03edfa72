"""`torsh bench compression`: real ranks, real numbers, and refusals before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from torsh_distributed.cli.app import app
from torsh_distributed.errors import TorshError

pytestmark = pytest.mark.ranks


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
