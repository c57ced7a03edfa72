"""Where values come from: precedence, sources, and texts of the environment and the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan import Plan, TrainingConfig


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text("[mesh]\ndp = 2\n[training]\nsteps = 10\nseed = 1\nbatch_size = 8\n")
    return path


def test_the_command_line_beats_the_environment_beats_the_file_beats_the_default(file: Path) -> None:
    environ = {"TORSH_PLAN__TRAINING__STEPS": "20", "TORSH_PLAN__TRAINING__SEED": "2", "PATH": "/bin"}
    plan = Plan.compose(file, environ=environ, command_line=["training.seed=3"])
    assert plan.training == TrainingConfig(batch_size=8, steps=20, seed=3)
    rows = plan.explain()
    assert rows["training.batch_size"].source == f"file {file}"
    assert rows["training.steps"].source == "environment TORSH_PLAN__TRAINING__STEPS"
    assert rows["training.seed"].source == "command line"
    assert rows["training.log_every"].source == "default"


def test_an_argument_beats_them_all(file: Path) -> None:
    plan = Plan.compose(file, command_line=["training.seed=3"]).replace(training={"seed": 4})
    assert plan.training.seed == 4
    assert plan.explain()["training.seed"].source == "argument"
    assert plan.explain()["training.steps"].source == f"file {file}"
    assert Plan(dp=2).explain()["mesh.dp"].source == "argument"
    # A section replaced whole keeps nothing of the old one, its sources included.
    assert plan.replace(training=TrainingConfig(seed=5)).explain()["training.steps"].source == "default"


def test_the_environment_names_a_file_and_changes_its_keys(file: Path) -> None:
    plan = Plan.from_env({"TORSH_PLAN": str(file), "TORSH_PLAN__MESH__DP": "4"})
    assert (plan.mesh.dp, plan.training.steps) == (4, 10)
    assert Plan.from_env({}) == Plan()
    assert Plan.from_env({"TORSH_PLAN": ""}) == Plan()


def test_the_environment_is_this_processs_unless_one_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORSH_PLAN__TRAINING__STEPS", "7")
    assert Plan.from_env().training.steps == 7


def test_a_file_given_by_name_beats_the_one_of_the_environment(file: Path) -> None:
    assert Plan.compose(file, environ={"TORSH_PLAN": "absent.toml"}).mesh.dp == 2


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("training.steps", "7", 7),
        ("training.learning_rate", "1e-4", 1e-4),
        ("training.learning_rate", "1", 1.0),
        ("training.gradient_clipping", "0.5", 0.5),
        ("ddp.static_graph", "true", True),
        ("fsdp.wrap_classes", '["Block", "Head"]', ("Block", "Head")),
        ("precision.dtype", "bf16", "bf16"),
        ("checkpoint.dir", "2024", "2024"),
        ("observe.events_dir", "/tmp/a=b", "/tmp/a=b"),
    ],
)
def test_text_is_read_as_the_key_wants_it(key: str, text: str, value: Any) -> None:
    variable = "TORSH_PLAN__" + key.replace(".", "__").upper()
    for plan in (Plan.from_env({variable: text}), Plan.compose(command_line=[f"{key}={text}"])):
        assert plan.value(key) == value
        assert type(plan.value(key)) is type(value)


@pytest.mark.parametrize(
    ("environ", "command_line", "message"),
    [
        (
            {"TORSH_PLAN__TRAINING__STEPS": "many"},
            [],
            (
                "plan: training.steps must be an integer, at least 1; got 'many'"
                " (from environment TORSH_PLAN__TRAINING__STEPS)"
            ),
        ),
        (
            {"TORSH_PLAN__MESH__DPP": "2"},
            [],
            "plan: mesh.dpp is not a key of [mesh] (from environment TORSH_PLAN__MESH__DPP)",
        ),
        ({"TORSH_PLAN__MESH": "2"}, [], "plan: environment TORSH_PLAN__MESH: mesh does not name a key"),
        ({}, ["dp=2"], "plan: command line: dp does not name a key"),
        ({}, ["=2"], "plan: command line: nothing does not name a key"),
        (
            {},
            ["training.steps=2\nseed = 3"],
            "plan: training.steps must be an integer, at least 1; got '2\\nseed = 3' (from command line)",
        ),
    ],
)
def test_a_bad_text_names_its_variable_or_the_command_line(
    environ: dict[str, str], command_line: list[str], message: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Plan.compose(environ=environ, command_line=command_line)
    assert caught.value.message == message
