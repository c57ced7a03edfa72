"""The command line: help that starts, errors in words, exit codes that tell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torsh_distributed.errors import error_codes

pytestmark = pytest.mark.ranks


def torsh(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torsh_distributed.cli.entry_point", *args],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "COLUMNS": "160", "NO_COLOR": "1", **env},
    )


def test_help_names_every_command() -> None:
    done = torsh("--help")
    assert done.returncode == 0
    for command in ("run", "demo", "plan", "explain", "env", "store"):
        assert command in done.stdout


def test_an_error_is_a_paragraph_without_a_traceback() -> None:
    done = torsh("explain", "BackendEror")
    assert done.returncode == 1
    assert "error InvalidArgument: no error has this code" in done.stderr
    assert "hint: did you mean BackendError?" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("path", [".", "missing/folder/file", "a-file/below", "x" * 300], ids=range(4))
def test_a_path_that_cannot_be_written_is_told_without_a_traceback(tmp_path: Path, path: str) -> None:
    (tmp_path / "a-file").touch()
    done = torsh("metrics", "--grafana", str(tmp_path / path))
    assert done.returncode == 1
    assert "error IoError: a file or folder cannot be used: " in done.stderr
    assert "Traceback" not in done.stderr


ODD = {
    "a port that is no number": (["top", "http://127.0.0.1:x/", "--once"], 1, "the page does not answer"),
    "a port beyond all": (["top", f"http://127.0.0.1:{10**20}/", "--once"], 1, "the page does not answer"),
    "a file that cannot be read": (["migrate", "config", "/proc/self/mem"], 1, "a file or folder cannot be used"),
    "a loop of links": (["submit", "--to", "ssh", "--set", "hosts=a", "--working-dir", "LOOP", "x.py"], 1, "error"),
    "fewer than no faults": (["chaos", "--random", "-1", "x.py"], 2, "--random"),
    "too many faults": (["chaos", "--random", "9", "--ranks", "2", "--steps", "2", "x.py"], 1, "more faults than"),
    "an unknown fault": (["chaos", "--random", "1", "--kinds", "flood", "x.py"], 1, "no kind of fault 'flood'"),
}


@pytest.mark.parametrize("case", ODD)
def test_odd_input_is_an_error_in_words(case: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    args, code, text = ODD[case]
    done = torsh(*[str(tmp_path / "loop") if word == "LOOP" else word for word in args])
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert text in done.stderr


def test_every_error_can_be_explained() -> None:
    from typer.testing import CliRunner

    from torsh_distributed.cli.app import app

    for code, kind in error_codes().items():
        result = CliRunner().invoke(app, ["explain", code])
        assert result.exit_code == 0
        assert code in result.output
        assert f"Retryable: {'yes' if kind.retryable else 'no'}" in result.output


def test_env_shows_the_place_and_hides_secrets() -> None:
    done = torsh("env", RANK="1", WORLD_SIZE="2", TORSH_JOB_TOKEN="hush-hush", TORSH_STORE_TOKEN="be-quiet")
    assert done.returncode == 0
    assert "rank 1 of 2" in done.stdout
    assert "hush-hush" not in done.stdout
    assert "be-quiet" not in done.stdout
    assert done.stdout.count("(hidden)") == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["pln"], "No such command 'pln'. Did you mean 'plan'"),
        (["demo", "llama"], "'gpt', 'mlp'"),
        (["demo", "--plan", "no-such-plan.toml"], "no-such-plan.toml"),
        (["demo", "--steps", "0"], "'--steps'"),
    ],
)
def test_wrong_words_are_refused_with_the_right_ones(args: list[str], message: str) -> None:
    done = torsh(*args)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
