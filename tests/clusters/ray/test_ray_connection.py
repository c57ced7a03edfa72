"""Code that Ray carries to a job's ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torsh_distributed.clusters.ray.ray_connection import cluster_of_this_job, own_token, take_carried_code

VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"


@pytest.mark.parametrize(
    ("runtime_env", "is_taken"),
    [
        ({"working_dir": "gcs://code.zip", "env_vars": {"TORSH_RAY_JOB": "{}"}}, True),
        ({"working_dir": "gcs://code.zip"}, True),
        ({"working_dir": "gcs://code.zip", "env_vars": {"TORSH_RAY_JOB": "{}", "MINE": "1"}}, False),
        ({"working_dir": "gcs://code.zip", "pip": ["einops"]}, False),
        ({"env_vars": {"TORSH_RAY_JOB": "{}"}}, False),
    ],
)
def test_a_working_directory_alone_is_carried_without_ray(
    runtime_env: dict[str, Any], is_taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"runtime_env": runtime_env, "metadata": {"job_submission_id": "a"}}
    monkeypatch.setenv(VARIABLE, json.dumps(config))
    monkeypatch.setenv("PYTHONPATH", "/code")
    monkeypatch.chdir(tmp_path)
    carried = take_carried_code(own_variable="TORSH_RAY_JOB")
    left = json.loads(os.environ[VARIABLE])
    if not is_taken:
        assert (carried, left) == (None, config)
        return
    assert carried is not None
    assert (carried.directory, carried.python_path) == (str(tmp_path), "/code")
    assert carried.runtime_env == {"working_dir": "gcs://code.zip"}
    assert left == {"runtime_env": {}, "metadata": {"job_submission_id": "a"}}


def test_the_token_is_found_where_ray_looks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert own_token() is None
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("from home\n")
    assert own_token() == "from home"
    (tmp_path / "token").write_text("from a file")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    assert own_token() == "from a file"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "from a variable")
    assert own_token() == "from a variable"


def test_a_job_belongs_to_the_cluster_whose_process_started_it() -> None:
    ask = "from torsh_distributed.clusters.ray.ray_connection import cluster_of_this_job as f; print(f())"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ask!r}], check=True)"
    done = subprocess.run(
        [sys.executable, "-c", start, "--gcs-address=192.0.2.7:6379"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == "192.0.2.7:6379"
    assert cluster_of_this_job() == "auto"
