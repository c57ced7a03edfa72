"""Our parts beside torch's, from the command: real ranks, real numbers, and refusals before anything is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from torsh_distributed.cli.app import app
from torsh_distributed.errors import TorshError

pytestmark = pytest.mark.ranks

QUICK = {
    "p2p": (["--sizes", "1KB,64KB"], 2, {"torch, torsh", "torch, gloo"}),
    "ddp": (["--width", "32"], 1, {"torch, torsh", "torch, gloo", "alone"}),
    "fsdp": (["--width", "32"], 1, {"torch, torsh", "torch, gloo", "alone"}),
    "pipeline": (["--width", "32"], 1, {"torch, torsh", "torch, gloo"}),
    "store": ([], 8, {"torch"}),
    "monitor": ([], 5, {"prometheus-client", "logging"}),
}
"""Arguments that make it quick, and the rows and rivals that it must give on a machine without a GPU."""
IN_SHORT = ("ddp", "monitor")


def measured(name: str, args: list[str], out: Path) -> list[dict[str, Any]]:
    done = CliRunner().invoke(app, ["bench", name, *args, "--rounds", "1", "--json", str(out)])
    assert done.exit_code == 0, done.output
    rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    for row in rows:
        assert row["ours"]["median"] > 0
        assert row["ratios"].keys() == row["rivals"].keys()
        for rival, ratio in row["ratios"].items():
            ours, theirs = row["ours"]["median"], row["rivals"][rival]["median"]
            assert ratio == pytest.approx(ours / theirs if row["unit"] == "B/s" else theirs / ours)
    return rows


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_SHORT else pytest.mark.matrix) for name in QUICK]
)
def test_ours_is_measured_beside_torchs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    args, num_rows, rivals = QUICK[name]
    rows = measured(name, args, tmp_path / "new" / "rows.json")
    assert len(rows) == num_rows
    assert {rival for row in rows for rival in row["rivals"]} == rivals


@pytest.mark.matrix
def test_checkpoints_are_measured_and_removed(tmp_path: Path) -> None:
    place = tmp_path / "disk"
    place.mkdir()
    rows = measured("checkpoint", ["--size", "1MB", "--folder", str(place)], tmp_path / "rows.json")
    assert [row["name"].split(",")[0] for row in rows] == ["save", "save in the background", "load"]
    assert [set(row["rivals"]) for row in rows] == [{"torch.save", "DCP"}, {"DCP"}, {"torch.save", "DCP"}]
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["ddp", "--backend", "carrier-pigeon"], "carrier-pigeon"),
        (["p2p", "--sizes", "1KB,many"], "a size is a whole number"),
        (["checkpoint", "--size", "1MB,2MB"], "one size"),
        (["checkpoint", "--folder", "/no/such/folder"], "does not exist"),
    ],
)
def test_what_cannot_be_measured_is_refused(args: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", *args])
    assert isinstance(done.exception, TorshError)
    assert message in str(done.exception)
