"""`torsh bench network`: real ranks, real numbers, and refusals before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from torsh_distributed.cli.app import app
from torsh_distributed.errors import TorshError

pytestmark = pytest.mark.ranks


@pytest.mark.matrix
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
