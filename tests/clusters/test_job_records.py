"""Records of submitted jobs: private, whole, found by name or id."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from torsh_distributed.clusters.job_records import (
    all_records,
    find_record,
    forget,
    job_directory,
    remember,
    require_job_name,
)
from torsh_distributed.clusters.submission import Submission
from torsh_distributed.errors import InvalidArgument, IoError, JobNotFound
from torsh_distributed.launch.spec import Entry
from torsh_distributed.private_files import state_directory


def submission(name: str, **changes: object) -> Submission:
    return Submission(entry=Entry(target="train.py", args=("--lr", "1")), name=name, **changes)  # type: ignore[arg-type]


def test_a_job_is_found_by_its_name_and_by_its_engines_id(state_dir: Path) -> None:
    first = remember(submission("one", nodes=2, workers_per_node=4), engine="slurm", job_id="17")
    remember(submission("two", options={"hosts": "a,b"}), engine="ssh", job_id="two")
    assert [record.name for record in all_records()] == ["one", "two"]
    assert find_record("one") == find_record("17") == first
    assert (first.workers, first.command) == (8, "train.py --lr 1")
    assert find_record("two").options == {"hosts": "a,b"}
    forget("one")
    with pytest.raises(JobNotFound, match="no job named 'one'") as caught:
        find_record("one")
    assert "the latest: two" in str(caught.value)


def test_ids_of_two_engines_may_be_equal(state_dir: Path) -> None:
    remember(submission("one"), engine="slurm", job_id="7")
    remember(submission("two"), engine="ray", job_id="7")
    with pytest.raises(JobNotFound, match="several jobs have the id '7'") as caught:
        find_record("7")
    assert "one (slurm), two (ray)" in str(caught.value)


def test_a_record_is_this_users_alone_and_has_no_variables(state_dir: Path) -> None:
    remember(submission("one", env={"WANDB_API_KEY": "hush-hush"}), engine="mpi", job_id="one")
    folder = job_directory("one")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (path,) = folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "hush-hush" not in path.read_text()


def test_a_damaged_record_is_named(state_dir: Path) -> None:
    remember(submission("one"), engine="mpi", job_id="one")
    path = job_directory("one") / "job.json"
    path.write_text(json.dumps({"name": "one"}))
    with pytest.raises(IoError, match="cannot be read") as caught:
        all_records()
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["", "../up", "a/b", "-f", ".hidden", "with blank", "x" * 129, "line\nbreak"])
def test_a_name_that_is_no_directory_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="a job's name may hold"):
        require_job_name(name)


def test_the_state_directory_follows_the_environment(tmp_path: Path) -> None:
    assert state_directory({"TORSH_STATE_DIR": "/a", "XDG_STATE_HOME": "/b"}) == Path("/a")
    assert state_directory({"XDG_STATE_HOME": "/b"}) == Path("/b/torsh")
    assert state_directory({}) == Path.home() / ".local/state/torsh"
