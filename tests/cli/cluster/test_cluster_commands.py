"""`torsh submit`, `jobs`, `logs`, `cancel`, `scale`: over real jobs of mpiexec in the background."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.bed.needs import mpiexec
from torsh_distributed.cli.app import app
from torsh_distributed.errors import TorshError

pytestmark = pytest.mark.ranks


SCRIPT = """
import os, sys
print("hello", os.environ["PMI_RANK"], os.environ["MINE"])
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORSH_STATE_DIR", str(tmp_path / "state"))


def torsh(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def refusal(*words: str) -> str:
    """What the command line would print about one of our errors."""
    error = torsh(*words).exception
    assert isinstance(error, TorshError), error
    return str(error)


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "job.py"
    path.write_text(
        "import os, sys\nprint('hello', os.environ['PMI_RANK'], os.environ['MINE'])\nsys.exit(int(sys.argv[1]))\n"
    )
    return str(path)


@pytest.mark.needs_command(mpiexec())
def test_a_job_is_submitted_followed_listed_and_forgotten(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "my value")
    words = ["submit", "--to", "mpi", "--nproc-per-node", "2", "--env", "MINE", "--set", f"mpiexec={mpiexec()}"]
    done = torsh(*words, "--name", "good", "--follow", script, "0")
    assert done.exit_code == 0, done.output
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("[rank")) == [
        "[rank 0] hello 0 my value",
        "[rank 1] hello 1 my value",
    ]
    assert "good (mpi good) succeeded" in done.stderr
    bad = torsh(*words, "--name", "bad", "--follow", script, "7")
    assert bad.exit_code == 7, bad.output
    assert "bad (mpi bad) failed with exit code 7: rank" in bad.stderr
    assert "failed first: SystemExit: 7" in bad.stderr
    assert "a job named 'good' was submitted before" in refusal(*words, "--name", "good", script, "0")
    listed = json.loads(torsh("jobs", "--json").stdout)
    assert [(job["name"], job["state"], job["exit_code"], job["workers"]) for job in listed] == [
        ("good", "succeeded", 0, 2),
        ("bad", "failed", 7, 2),
    ]
    assert "my value" not in json.dumps(listed)
    assert "good" in torsh("jobs").stdout
    assert "[rank 0] hello 0 my value" in torsh("logs", "good").stdout
    assert "keep the size they were submitted with" in refusal("scale", "good", "4")
    assert torsh("cancel", "good").stdout.startswith("torsh: good (mpi good) succeeded")
    assert torsh("jobs", "--forget", "good").exit_code == 0
    assert "no job named 'good'" in refusal("logs", "good")


@pytest.mark.needs_command(mpiexec())
def test_a_dry_run_shows_the_line_without_values_and_leaves_nothing(script: str, tmp_path: Path) -> None:
    words = ["submit", "--to", "mpi", "--set", f"mpiexec={mpiexec()}", "--env", "MINE=hush", "--dry-run", script]
    shown = torsh(*words).stdout
    assert "-genvlist" in shown
    assert f"{shlex.quote(sys.executable)} " in shown
    assert "hush" not in shown
    assert not (tmp_path / "state").exists()


def test_wrong_words_are_refused(script: str, tmp_path: Path) -> None:
    assert "ssh" in torsh("submit", "--engines").stdout
    assert "--to is missing" in refusal("submit", script)
    assert "did you mean 'slurm'" in refusal("submit", "--to", "slurn", script)
    assert "does not exist" in refusal("submit", "--to", "mpi", str(tmp_path / "no.py"))
    assert "needs hosts" in refusal("submit", "--to", "ssh", script)
    assert "there are 1 of 2: a (2 slots), b (8 slots)" in refusal(
        "submit", "--to", "ssh", "--nodes", "2", "--nproc-per-node", "4", "--set", "hosts=a:2,b:8", script
    )
    assert "must read key=value" in refusal("submit", "--to", "mpi", "--set", "x", script)
    assert "--env NOT_SET_ANYWHERE: no variable of that name is set here" in refusal(
        "submit", "--to", "mpi", "--env", "NOT_SET_ANYWHERE", script
    )
    assert "without --follow has no effect" in refusal("submit", "--to", "mpi", "--queue-timeout", "1m", script)
    assert "no job named 'x'" in refusal("cancel", "x")
    for words in (
        ["--hosts", "a"],
        ["--ssh"],
        ["--ssh", "--hosts", "a:1,a:1"],
        ["--ssh", "--hosts", "a", "--nnodes", "2"],
    ):
        assert torsh("run", *words, script).exit_code != 0
    assert "without --ssh has no effect" in refusal("run", "--hosts", "a", script)
