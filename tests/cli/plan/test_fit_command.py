"""`torsh plan fit`: the table, the verdict, and what would close the gap."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from torsh_distributed.cli.plan.commands import app
from torsh_distributed.cli.plan.fit_command import memory_bytes
from torsh_distributed.errors import ConfigurationError, FeatureNotAvailable, InvalidArgument

MODEL = "tests.planner.live_memory:char_gpt"


def fit(*args: str) -> Result:
    return CliRunner().invoke(app, ["fit", MODEL, *args], env={"COLUMNS": "200"})


def test_the_table_names_what_the_memory_is_for() -> None:
    shown = fit("--memory", "1GB", "--gpus", "2")
    assert shown.exit_code == 0, shown.output
    for term in ("parameters", "gradients", "optimizer state", "activations", "computing", "peak"):
        assert term in shown.output
    assert "fits: " in shown.output
    assert "16 samples in a microbatch" in shown.output


def test_what_does_not_fit_says_what_is_missing_and_what_closes_the_gap() -> None:
    shown = fit("--memory", "36MB", "--gpus", "2")
    assert shown.exit_code == 1
    assert "does not fit" in shown.output
    assert "fits with training.gradient_accumulation = 2" in shown.output


def test_where_no_plan_fits_the_nearest_is_named() -> None:
    shown = fit("--memory", "2MB", "--gpus", "2")
    assert shown.exit_code == 1
    assert "no change of the plan is enough on these devices; nearest" in shown.output


def test_a_change_that_is_said_to_close_the_gap_does() -> None:
    key = "training.gradient_accumulation=2"
    shown = fit("--memory", "36MB", "--gpus", "2", "--set", key)
    assert shown.exit_code == 0, shown.output


def test_the_plan_comes_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("[mesh]\ndp = 1\npp = 2\n")
    shown = fit("--memory", "1GB", "--plan", str(tmp_path / "plan.toml"))
    assert "pp 0" in shown.output
    assert "pp 1" in shown.output
    assert "stage buffers" in shown.output


@pytest.mark.parametrize(
    ("text", "expected"), [("80GB", 80e9), ("24GiB", 24 * 2**30), ("512 MB", 512e6), ("80", 80e9), ("1.5tb", 1.5e12)]
)
def test_sizes_are_read(text: str, expected: float) -> None:
    assert memory_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "-3GB", "0", "80 apples"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a size"):
        memory_bytes(text)


def test_without_a_gpu_the_memory_must_be_named() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(FeatureNotAvailable, match="--memory 80GB"):
        raise fit().exception or AssertionError("it answered")


def test_an_optimizer_that_cannot_be_tried_is_said_and_counted_as_adamw() -> None:
    shown = fit("--memory", "1GB", "--optimizer", "LBFGS")
    assert shown.exit_code == 0, shown.output
    assert "LBFGS (counted with the state of AdamW: LBFGS cannot be tried" in shown.output
    with pytest.raises(InvalidArgument, match="no optimizer AdmaW"):
        CliRunner().invoke(app, ["fit", MODEL, "--memory", "1GB", "--optimizer", "AdmaW"], catch_exceptions=False)


def test_a_model_larger_than_this_machine_takes_no_memory_and_gets_the_nearest_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "from torch import nn\n\ndef build():\n    layers = (nn.Linear(2**19, 2**19) for _ in range(4))\n"
    (tmp_path / "vast_model.py").write_text(module + "    return nn.Sequential(*layers)\n")
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(
        app, ["fit", "vast_model:build", "--memory", "80GB", "--gpus", "8"], env={"COLUMNS": "200"}
    )
    assert shown.exit_code == 1
    assert "1.1 trillion parameters" in shown.output
    assert "no change of the plan is enough on these devices; nearest" in shown.output
