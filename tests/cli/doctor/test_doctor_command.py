"""`torsh doctor` and `torsh collect` at the command line."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from torsh_distributed.cli.doctor import collect_command, doctor_command
from torsh_distributed.errors import InvalidArgument, JobNotFound


def test_the_machine_is_checked_and_bad_variables_fail_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    done = CliRunner().invoke(doctor_command.app, ["--no-all-reduce"])
    assert done.exit_code == 0, done.output
    assert "torch: torch 2." in done.output
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = CliRunner().invoke(doctor_command.app, ["--no-all-reduce", "--json"])
    assert done.exit_code == 1, done.output
    report = json.loads(done.output)
    bad = {one["check_name"]: one for one in report["results"] if one["severity"] == "error"}
    assert set(bad) == {"RANK", "MASTER_ADDR"}
    assert bad["RANK"]["remediation"]


@pytest.mark.slow
@pytest.mark.ranks
def test_a_real_all_reduce_ends_the_checks() -> None:
    from torsh_distributed.cli.doctor.doctor_command import check_all_reduce

    found = check_all_reduce()
    assert found.passed, found
    assert set(found.data) >= {"torsh", "gloo"}


def test_a_pid_that_is_no_launcher_is_an_error() -> None:
    for arguments, error in ((["--pid", "1"], JobNotFound), (["--pid", "1", "--job", "x"], InvalidArgument)):
        done = CliRunner().invoke(doctor_command.app, arguments)
        assert isinstance(done.exception, error)


def test_collect_writes_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "very-secret-value")
    (tmp_path / "plan.toml").write_text('[compress]\nmethod = "int8"\n# very-secret-value\n')
    target = tmp_path / "out.tar.gz"
    done = CliRunner().invoke(collect_command.app, [str(tmp_path / "plan.toml"), "-o", str(target)])
    assert done.exit_code == 0, done.output
    with tarfile.open(target) as archive:
        content = {one.name: archive.extractfile(one).read().decode() for one in archive if one.isfile()}  # type: ignore[union-attr]  # files
    assert 'method = "int8"' in content["out/files/plan.toml"]
    assert not any("very-secret-value" in text for text in content.values())
