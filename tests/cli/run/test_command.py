from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from torsh_distributed.cli.plan.commands import app as plan_app
from torsh_distributed.cli.run.command import app
from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument, IoError
from torsh_distributed.launch import job
from torsh_distributed.launch.spec import EntryKind, JobSpec
from torsh_distributed.launch.worker import worker_start

pytestmark = pytest.mark.ranks


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch) -> list[JobSpec]:
    """The specs that would be launched; the launching itself is tested elsewhere."""
    taken: list[JobSpec] = []
    monkeypatch.setattr(job, "launch_job", lambda spec: taken.append(spec) or 0)
    return taken


def parse(specs: list[JobSpec], *args: str, env: dict[str, str] | None = None) -> JobSpec:
    result = CliRunner().invoke(app, list(args), env=env, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return specs[-1]


def test_options_before_the_script_are_ours_and_all_after_it_belong_to_the_script(specs: list[JobSpec]) -> None:
    spec = parse(specs, "--nproc-per-node", "2", "train.py", "--nproc-per-node", "9", "-m", "--lr=1", "--", "x")
    assert spec.nproc_per_node == 2
    assert spec.entry.target == "train.py"
    assert spec.entry.args == ("--nproc-per-node", "9", "-m", "--lr=1", "--", "x")
    assert spec.entry.kind is EntryKind.SCRIPT


def test_torchruns_command_lines_are_understood(specs: list[JobSpec]) -> None:
    spec = parse(
        specs,
        *["--nnodes=2", "--node_rank=1", "--nproc_per_node=4", "--master_addr=10.0.0.1", "--master_port=1234"],
        *["--max_restarts=3", "--log_dir", "logs", "--rdzv_id", "job-7", "--role", "trainer", "train.py"],
    )
    assert (spec.nnodes, spec.node_rank, spec.nproc_per_node) == (2, 1, 4)
    assert (spec.master_addr, spec.master_port) == ("10.0.0.1", 1234)
    assert (spec.max_restarts, spec.log_dir, spec.run_id, spec.role) == (3, Path("logs"), "job-7", "trainer")
    spec = parse(
        specs,
        *["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node0:29400", "-m", "pkg.train", "--flag"],
    )
    assert (spec.master_addr, spec.master_port) == ("node0", 29400)
    assert (spec.entry.kind, spec.entry.target, spec.entry.args) == (EntryKind.MODULE, "pkg.train", ("--flag",))
    spec = parse(specs, "--standalone", "--nproc-per-node", "auto", "train.py")
    assert (spec.nnodes, spec.master_addr, spec.master_port) == (1, "127.0.0.1", None)
    assert spec.nproc_per_node >= 1


def test_the_variables_of_torchrun_set_defaults(specs: list[JobSpec]) -> None:
    env = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "3", "PET_MASTER_ADDR": "h"}
    spec = parse(specs, "--nproc-per-node", "5", "train.py", env=env)
    assert (spec.nnodes, spec.node_rank, spec.nproc_per_node, spec.master_addr) == (2, 1, 5, "h")


def test_runs_on_one_node_get_names_of_their_own_and_nodes_share_one(specs: list[JobSpec]) -> None:
    assert parse(specs, "train.py").run_id != parse(specs, "train.py").run_id
    assert parse(specs, "--nnodes", "2", "train.py").run_id == "none"


def test_the_token_comes_from_the_file_or_the_environment(specs: list[JobSpec], tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("from-file\n")
    file.chmod(0o600)
    env = {"TORSH_JOB_TOKEN": "from-env"}
    assert parse(specs, "train.py", env={"TORSH_JOB_TOKEN": ""}).token is None
    assert parse(specs, "train.py", env=env).token == "from-env"
    assert parse(specs, "--token-file", str(file), "train.py", env=env).token == "from-file"


def test_a_token_that_another_user_could_read_or_replace_is_refused(specs: list[JobSpec], tmp_path: Path) -> None:
    file = tmp_path / "open" / "token"
    file.parent.mkdir()
    file.write_text("secret")
    file.chmod(0o644)
    with pytest.raises(IoError, match="other users can read or write it"):
        parse(specs, "--token-file", str(file), "train.py")
    file.chmod(0o600)
    file.parent.chmod(0o777)
    with pytest.raises(IoError, match="other users can write its directory"):
        parse(specs, "--token-file", str(file), "train.py")
    assert specs == []


PLANS = {
    "good": "[training]\nsteps = 10\n",
    "an unknown key": "[training]\nstepz = 10\n",
    "too few ranks": "[mesh]\ndp = 3\ntp = 2\n",
    "two keys that clash": '[mesh]\nshard = 2\n[fsdp]\nstrategy = "hybrid_shard"\n',
}


@pytest.mark.parametrize("case", PLANS)
def test_a_plan_is_checked_for_the_world_before_anything_starts(
    specs: list[JobSpec], tmp_path: Path, case: str
) -> None:
    """The check of `torsh plan validate`: the same words, and status 2 as for any other wrong option."""
    plan = tmp_path / "plan.toml"
    plan.write_text(PLANS[case])
    checked = CliRunner().invoke(plan_app, ["validate", str(plan), "--world", "2"])
    done = CliRunner().invoke(app, ["--plan", str(plan), "--nproc-per-node", "2", "train.py"])
    if case == "good":
        assert (done.exit_code, checked.exit_code) == (0, 0)
        assert specs[0].env == {"TORSH_PLAN": str(plan)}
    else:
        assert done.exit_code == 2
        assert all(line.strip() in done.stderr for line in str(checked.exception).splitlines())
        assert specs == []


def test_variables_that_change_the_plan_are_checked_with_it(specs: list[JobSpec], tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text("[mesh]\ndp = 2\n")
    env = {"TORSH_PLAN__MESH__DP": "3"}
    for args, code in ((["--nproc-per-node", "2"], 2), (["--nproc-per-node", "3"], 0), (["--nnodes", "3"], 0)):
        assert CliRunner().invoke(app, [*args, "--plan", str(plan), "train.py"], env=env).exit_code == code
    done = CliRunner().invoke(app, ["--plan", str(tmp_path / "absent.toml"), "train.py"])
    assert (done.exit_code, "absent.toml" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ("--nproc-per-node 0 t.py", InvalidArgument, "at least 1"),
        ("--nproc-per-node two t.py", InvalidArgument, "number, auto, cpu or gpu"),
        ("--nnodes 0 t.py", InvalidArgument, "at least 1"),
        ("--nnodes 1:4 t.py", FeatureNotAvailable, "fixed"),
        ("--nnodes 2 --node-rank 2 t.py", InvalidArgument, "node rank 2 is outside"),
        ("--standalone --nnodes 2 t.py", InvalidArgument, "one node"),
        ("--standalone --master-port 5 t.py", InvalidArgument, "by itself"),
        ("--rdzv-endpoint a:1 --master-addr a t.py", InvalidArgument, "twice"),
        ("--rdzv-endpoint a:x t.py", InvalidArgument, "HOST:PORT"),
        ("--rdzv-backend etcd t.py", FeatureNotAvailable, "etcd"),
        ("--master-port 70000 t.py", InvalidArgument, "65535"),
        ("-m --no-python t.py", InvalidArgument, "exclude"),
        ("--local-ranks-filter a t.py", InvalidArgument, "numbers with commas"),
        ("--token-file /no/such/file t.py", IoError, "file of the secret"),
        ("--token-file /dev/null t.py", IoError, "regular file"),
        ("--join-timeout 0 t.py", InvalidArgument, "positive"),
    ],
)
def test_wrong_options_are_refused_with_a_reason(
    specs: list[JobSpec], args: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        parse(specs, *args.split())
    assert specs == []


@pytest.mark.parametrize("args", [["--no-such-flag", "t.py"], [], ["--max-restarts", "x", "t.py"]])
def test_a_command_line_that_makes_no_sense_shows_the_usage(args: list[str]) -> None:
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 2
    assert "Usage" in result.output


def test_a_dry_run_starts_nothing_and_shows_every_worker(specs: list[JobSpec], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    args = ["--dry-run", "--nproc-per-node", "2", str(script), "--lr", "1"]
    result = CliRunner().invoke(app, args, env={"TORSH_JOB_TOKEN": "very-secret"}, catch_exceptions=False)
    assert result.exit_code == 0
    line = shlex.join([sys.executable, "-u", str(worker_start.__file__), str(script), "--lr", "1"])
    assert f"rank 1: {line}" in result.output
    assert "MASTER_PORT='a free port'" in result.output
    assert "very-secret" not in result.output
    assert specs == []


def run_module(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torsh_distributed.run", *args], capture_output=True, text=True, timeout=60, **options
    )


def test_the_module_runs_a_job_and_returns_its_code(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text("import os, sys\nprint('rank', os.environ['RANK'], sys.argv[1])\nsys.exit(4)\n")
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    # A script without torch: nothing is gained by importing it once for all workers.
    done = run_module("--nproc-per-node", "2", "--start-method", "spawn", str(script), "hello", env=env)
    assert done.returncode == 4
    assert "OMP_NUM_THREADS=1 for every worker" in done.stderr
    assert "failed first: exit code 4" in done.stderr
    assert "hello" in done.stdout


def test_a_plan_that_does_not_fit_is_one_error_and_no_worker_starts(tmp_path: Path) -> None:
    script, plan = tmp_path / "train.py", tmp_path / "plan.toml"
    script.write_text("open('started', 'w')\n")
    plan.write_text("[mesh]\ndp = 3\ntp = 2\n")
    done = run_module("--nproc-per-node", "2", "--plan", str(plan), str(script), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("error ConfigurationError") == 1
    assert "but the world has 2 ranks" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "started").exists()


def test_the_module_says_what_is_wrong_in_one_paragraph(tmp_path: Path) -> None:
    done = run_module(str(tmp_path / "absent.py"))
    assert done.returncode == 1
    assert "does not exist" in done.stderr
    assert "hint:" in done.stderr
    assert "Traceback" not in done.stderr
