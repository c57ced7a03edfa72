"""`torsh plan`: what it prints, and what it says about broken plans."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from torsh_distributed.cli.plan.commands import app
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan import Plan
from torsh_distributed.plan.pages import render_compatibility, render_reference

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples/plans").glob("*.toml"))


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORSH_PLAN", raising=False)
    monkeypatch.setenv("COLUMNS", "200")


def torsh_plan(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refusal(*arguments: str | Path) -> str:
    """What the command says before it ends with status 1."""
    result = torsh_plan(*arguments)
    assert result.exit_code == 1
    assert isinstance(result.exception, ConfigurationError)
    return str(result.exception)


# Name, content, ranks, and the whole message; FILE stands for the path.
BROKEN = {
    "unknown key": (
        "plan.toml",
        "[mesh]\ndpp = 2\n",
        "2",
        "FILE: mesh.dpp is not a key of [mesh]\n  got:  key=mesh.dpp\n  hint: did you mean dp?",
    ),
    "key of another section": (
        "plan.toml",
        "dp = 2\n",
        "2",
        "FILE: dp is not a key of a plan\n  got:  key=dp\n  hint: dp belongs in [mesh]",
    ),
    "unknown section": (
        "plan.json",
        '{"trainin": {"steps": 3}}',
        "2",
        "FILE: trainin is not a key of a plan\n  got:  key=trainin\n  hint: did you mean training?",
    ),
    "wrong type": (
        "plan.yaml",
        "training:\n  steps: ten\n",
        "2",
        (
            "FILE: training.steps must be an integer, at least 1; got 'ten'\n  got:  key=training.steps\n"
            "  hint: run `torsh plan validate FILE`: it reports every problem at once"
        ),
    ),
    "value out of range": (
        "plan.toml",
        "[training]\nlearning_rate = -1.0\n",
        "2",
        (
            "FILE: training.learning_rate must be a number, above 0; got -1.0\n  got:  key=training.learning_rate\n"
            "  hint: run `torsh plan validate FILE`: it reports every problem at once"
        ),
    ),
    "unknown choice": (
        "plan.toml",
        '[precision]\ndtype = "bfloat16"\n',
        "2",
        (
            "FILE: precision.dtype must be one of fp32, bf16, fp16, fp8; got 'bfloat16'\n  got:  key=precision.dtype\n"
            "  hint: did you mean bf16?"
        ),
    ),
    "unknown backend": (
        "plan.toml",
        '[distributed]\nbackend = "glo"\n',
        "2",
        (
            "FILE: distributed.backend must be auto, gloo, nccl, torsh, shm, mpi4py, ucc, fake, one per device such as"
            " cpu:gloo,cuda:nccl, or a name that backend_module registers; got 'glo'\n"
            "  got:  key=distributed.backend\n  hint: did you mean gloo?"
        ),
    ),
    "section that is a value": (
        "plan.toml",
        "mesh = 4\n",
        "2",
        (
            "FILE: mesh must be a section with keys of its own (dp, shard, tp, pp, ep, cp); got 4\n  got:  key=mesh\n"
            "  hint: run `torsh plan validate FILE`: it reports every problem at once"
        ),
    ),
    "values that exclude each other": (
        "plan.toml",
        "[ddp]\nstatic_graph = true\nfind_unused_parameters = true\n",
        "2",
        (
            "FILE: ddp.find_unused_parameters and ddp.static_graph exclude each other\n"
            "  got:  key=ddp.find_unused_parameters\n"
            "  hint: keep ddp.static_graph if every step uses the same parameters: it finds unused ones once"
        ),
    ),
    "two axes that fill": (
        "plan.toml",
        "[mesh]\ndp = -1\nshard = -1\n",
        "2",
        (
            "FILE: mesh.dp and mesh.shard are both -1, but only one axis can fill the world\n  got:  key=mesh.shard\n"
            "  hint: give all but one of them a number"
        ),
    ),
    "both spellings of a key": (
        "plan.toml",
        "[ddp]\nmax_bucket_size_mb = 5.0\nbucket_size_mb = 6.0\n",
        "2",
        (
            "FILE: ddp.bucket_size_mb and ddp.max_bucket_size_mb are both given, and mean the same\n"
            "  got:  key=ddp.bucket_size_mb\n  hint: keep ddp.max_bucket_size_mb"
        ),
    ),
    "mesh that is not the world": (
        "plan.toml",
        "[mesh]\ndp = 4\n",
        "6",
        (
            "FILE: dp 4 × tp 1 × pp 1 = 4, but the world has 6 ranks\n  got:  key=mesh\n"
            "  hint: start 4 ranks, or set one degree of [mesh] to -1 to fill the world"
        ),
    ),
    "batch that is too small": (
        "plan.toml",
        "[training]\nbatch_size = 3\n",
        "4",
        (
            "FILE: training.batch_size 3 is below data-parallel degree 4 × training.gradient_accumulation 1 = 4\n"
            "  got:  key=training.batch_size\n"
            "  hint: raise training.batch_size: every pass of every rank needs at least one sample"
        ),
    ),
    "malformed TOML": (
        "plan.toml",
        "[mesh]\ndp = = 2\n",
        "2",
        (
            "FILE, line 2, column 6: not valid TOML: Invalid value\n"
            "  hint: fix the file there, or start from a plan in examples/plans"
        ),
    ),
    "malformed JSON": (
        "plan.json",
        '{"mesh": {"dp" 2}}',
        "2",
        (
            "FILE, line 1, column 16: not valid JSON: Expecting ':' delimiter\n"
            "  hint: fix the file there, or start from a plan in examples/plans"
        ),
    ),
    "malformed YAML": (
        "plan.yaml",
        "mesh: {dp: 2\n",
        "2",
        (
            "FILE, line 2, column 1: not valid YAML: expected ',' or '}', but got '<stream end>'\n"
            "  hint: fix the file there, or start from a plan in examples/plans"
        ),
    ),
    "list in place of sections": (
        "plan.json",
        "[1, 2]",
        "2",
        (
            "FILE: a plan is a table of sections, but this file holds a list\n"
            "  hint: write sections such as [mesh] and [training] with keys under them"
        ),
    ),
    "unknown suffix": (
        "plan.ini",
        "[mesh]\n",
        "2",
        (
            "FILE: a plan's format follows from its suffix, and .ini is not one of .toml, .json, .yaml, .yml\n"
            "  hint: rename the file, for instance to plan.toml"
        ),
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_validate_refuses_a_broken_plan(tmp_path: Path, kind: str) -> None:
    name, content, world, message = BROKEN[kind]
    path = tmp_path / name
    path.write_text(content)
    said = refusal("validate", path, "--world", world)
    assert said.replace(str(path), "FILE") == message


def test_validate_refuses_a_missing_file_and_none_at_all(tmp_path: Path) -> None:
    assert refusal("validate", tmp_path / "absent.toml").startswith(f"there is no plan file {tmp_path}/absent.toml")
    assert refusal("validate") == "there is no plan to check\n  hint: name a file, or set TORSH_PLAN"


def test_validate_lists_every_problem_of_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('[mesh]\ndpp = 2\n[training]\nsteps = 0\n[precision]\ndtype = "fp64"\n')
    assert refusal("validate", path).splitlines()[0] == f"{path} has 3 problems:"


def test_validate_notes_a_setting_without_effect(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text("[tensor]\nsequence_parallel = true\n")
    result = torsh_plan("validate", path)
    assert result.exit_code == 0, result.exception
    assert result.output.splitlines() == [
        f"{path} is valid",
        "note: tensor.sequence_parallel = true has no effect while mesh.tp is 1",
    ]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_valid_for_its_ranks_and_says_what_it_is_for(path: Path) -> None:
    degrees = Plan.load(path).mesh.degrees.values()
    world = 2 if -1 in degrees else math.prod(degrees)
    result = torsh_plan("validate", path, "--world", str(world))
    assert result.exit_code == 0, result.exception
    assert result.output.startswith(f"{path} is valid\ndp ")
    assert f"= {world} ranks; a step takes " in result.output
    assert path.read_text().startswith("# ")


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 4


def test_show_tells_value_source_and_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('[mesh]\ntp = 2\n[fsdp]\nwrap_classes = ["Block"]\n')
    monkeypatch.setenv("TORSH_PLAN__TRAINING__SEED", "3")
    settings = ["--set", "training.batch_size=33", "--set", "training.gradient_accumulation=2"]
    result = torsh_plan("show", path, *settings, "--world", "4")
    assert result.exit_code == 0, result.exception
    rows = [
        [cell.strip() for cell in line.strip("│\n ").split("│")]
        for line in result.output.splitlines()
        if line.startswith("│")
    ]
    assert rows == [
        ["mesh.tp", "2", f"file {path}", "honoured"],
        ["fsdp.wrap_classes", "[Block]", f"file {path}", "off by mesh.shard"],
        ["training.batch_size", "33", "command line", "honoured"],
        ["training.gradient_accumulation", "2", "command line", "honoured"],
        ["training.seed", "3", "environment TORSH_PLAN__TRAINING__SEED", "honoured"],
    ]
    hidden = len(Plan().explain().rows) - len(rows)
    assert f"{hidden} keys are at their defaults (--all shows them)." in result.output.splitlines()
    assert [line.strip() for line in result.output.splitlines() if line.strip()][-8:] == [
        "dp   tp 0   tp 1",
        "─" * 16,
        "0     0·0    1·0",
        "1     2·1    3·1",
        "a cell is rank·part of the batch; ranks count fastest along tp",
        "dp    2 replicas, each on its own part of the batch",
        "tp    each rank keeps 1/2 of every split layer, and sees the same samples",
        "dp 2 × tp 2 × pp 1 = 4 ranks; a step takes 33 samples: 16 or 17 on each of 2 replicas, in 2 passes",
    ]


@pytest.mark.parametrize(
    ("mesh", "world"),
    [({}, 20), ({"tp": 16}, 32), ({"shard": 2, "tp": 8, "pp": 2}, 64), ({"shard": -1}, 8)],
)
def test_the_drawing_shows_every_rank_once_within_a_terminal(
    monkeypatch: pytest.MonkeyPatch, mesh: dict[str, int], world: int
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    settings = [word for axis, degree in mesh.items() for word in ("--set", f"mesh.{axis}={degree}")]
    output = torsh_plan("show", *settings, "--world", str(world)).output.partition("schedule of")[0]
    assert "…" not in output
    assert sorted(int(rank) for rank in re.findall(r"(\d+)·", output)) == list(range(world))


@pytest.mark.slow
def test_the_drawing_has_the_schedule_of_a_pipeline_and_its_bubble(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text("[mesh]\ndp = 2\npp = 2\n[pipeline]\nnum_microbatches = 4\n")
    result = torsh_plan("show", path, "--world", "4", "--png", tmp_path / "plan.png")
    assert result.exit_code == 0, result.exception
    about, first, second, legend = result.output.partition("schedule of ")[2].splitlines()[:4]
    assert about.startswith("each of 2 pipelines: one_f_one_b, 1 stage on each rank along pp, 4 microbatches")
    assert (first[:6], second[:6]) == ("rank 0", "rank 1")
    assert "bubble 20.0%" in legend, "(p - 1) / (m + p - 1)"
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    alone = torsh_plan("show", "--set", "mesh.dp=2", "--world", "2", "--png", tmp_path / "mesh.png")
    assert "schedule of" not in alone.output
    assert (tmp_path / "mesh.png").stat().st_size < (tmp_path / "plan.png").stat().st_size
    assert refusal("show", path, "--png", tmp_path / "x.png").startswith("--png draws a plan for a number of ranks")


def test_show_takes_the_plan_of_the_environment_and_shows_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Plan(dp=2).save(tmp_path / "plan.toml")
    monkeypatch.setenv("TORSH_PLAN", str(tmp_path / "plan.toml"))
    output = torsh_plan("show", "--all").output
    for row in Plan().explain():
        assert f" {row.key} " in output


def test_schema_describes_every_section() -> None:
    schema = json.loads(torsh_plan("schema").output)
    assert list(schema["properties"]) == list(Plan.model_fields)
    steps = schema["$defs"]["TrainingConfig"]["properties"]["steps"]
    assert steps["default"] == 1000
    assert steps["description"] == "Optimizer updates in a run."


def test_reference_prints_the_page_or_writes_it(tmp_path: Path) -> None:
    assert torsh_plan("reference").output == render_reference()
    assert torsh_plan("reference", "--output", tmp_path / "plan.md").exit_code == 0
    assert (tmp_path / "plan.md").read_text() == render_reference()


def test_compatibility_prints_the_page_or_writes_it(tmp_path: Path) -> None:
    assert torsh_plan("compatibility").output == render_compatibility()
    assert torsh_plan("compatibility", "--output", tmp_path / "page.md").exit_code == 0
    assert (tmp_path / "page.md").read_text() == render_compatibility()
