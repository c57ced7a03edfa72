"""What ranks without a launcher write down, and who is named for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from torsh_distributed.clusters.base import JobState, JobStatus
from torsh_distributed.clusters.ranks.rank_reports import (
    first_failure,
    job_variables,
    rank_command,
    report_directory,
    with_cause,
)
from torsh_distributed.clusters.submission import Submission
from torsh_distributed.launch.spec import Entry, EntryKind


def run_rank(folder: Path, body: str, *, rank: int = 1, kind: EntryKind = EntryKind.SCRIPT) -> int:
    script = folder / "job_of_a_rank.py"
    script.write_text(body)
    target = str(script) if kind is EntryKind.SCRIPT else "job_of_a_rank"
    command = rank_command(Submission(entry=Entry(kind=kind, target=target, args=("x",)), name="job"))
    env = {**os.environ, "TORSH_REPORT_DIR": str(folder / "reports"), "SLURM_PROCID": str(rank)}
    env.pop("RANK", None)
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, timeout=60).returncode


@pytest.fixture
def reports(tmp_path: Path) -> Path:
    return report_directory(tmp_path)


@pytest.mark.parametrize("kind", [EntryKind.SCRIPT, EntryKind.MODULE])
def test_an_exception_is_written_down_with_the_users_line(reports: Path, tmp_path: Path, kind: EntryKind) -> None:
    assert run_rank(tmp_path, "import sys\nassert sys.argv[1] == 'x'\n\nraise KeyError('lost')\n", kind=kind) == 1
    found = first_failure(reports)
    assert found is not None
    assert found.exit_code == 1
    assert found.text.startswith(f"rank 1 on {os.uname().nodename} failed first: KeyError: 'lost' at ")
    assert "job_of_a_rank.py:4" in found.text


@pytest.mark.parametrize(
    ("body", "code"), [("", 0), ("raise SystemExit(0)", 0), ("import sys; sys.exit(75)", 75), ("pass", 0)]
)
def test_a_good_end_and_a_saved_one_leave_no_report(reports: Path, tmp_path: Path, body: str, code: int) -> None:
    assert run_rank(tmp_path, body) == code
    assert list(reports.iterdir()) == []


def test_a_script_without_a_handler_survives_the_notice_before_a_time_limit(reports: Path, tmp_path: Path) -> None:
    assert run_rank(tmp_path, f"import os\nos.kill(os.getpid(), {int(signal.SIGUSR1)})\n") == 0


def test_the_cause_is_the_first_that_does_not_blame_another(reports: Path) -> None:
    told = [(0, True, 1.0, "ConnectionError"), (2, False, 3.0, "ValueError"), (1, False, 2.0, "KeyError")]
    for rank, is_consequence, at_s, kind in told:
        record = {"rank": rank, "host": "h", "at_s": at_s, "kind": kind, "is_consequence": is_consequence}
        (reports / f"rank-{rank}.json").write_text(json.dumps({**record, "message": "m\nmore", "exit_code": 5}))
    found = first_failure(reports)
    assert found is not None
    assert found.text == "rank 1 on h failed first: KeyError: m\n  then rank 0, 2"
    status = with_cause(JobStatus(state=JobState.FAILED, exit_code=143, detail="FAILED"), reports)
    assert (status.exit_code, status.detail) == (5, f"FAILED; {found.text}")
    good = JobStatus(state=JobState.SUCCEEDED, exit_code=0)
    assert with_cause(good, reports) is good


def test_no_report_says_nothing(tmp_path: Path) -> None:
    assert first_failure(tmp_path / "reports") is None


def test_variables_of_a_job_give_way_to_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    asked = Submission(entry=Entry(target="x.py"), name="job", workers_per_node=2, plan=Path("/p.toml"))
    found = job_variables(asked, reports=tmp_path, secret_file=tmp_path / "token")
    assert (found["OMP_NUM_THREADS"], found["TORSH_PLAN"]) == ("1", "/p.toml")
    assert found["TORSH_SECRET_FILE"] == str(tmp_path / "token")
    chosen = Submission(entry=Entry(target="x.py"), name="job", cpus_per_worker=4, env={"OMP_NUM_THREADS": "7"})
    assert job_variables(chosen, reports=tmp_path, secret_file=None)["OMP_NUM_THREADS"] == "7"


def test_a_command_is_run_as_it_is() -> None:
    entry = Entry(kind=EntryKind.COMMAND, target="./train", args=("1",))
    assert rank_command(Submission(entry=entry, name="job")) == ["./train", "1"]
    assert rank_command(Submission(entry=Entry(target="x.py"), name="job"))[0] == sys.executable
