"""Scripts through Ray's own job server."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clusters.engine_marks import RAY
from tests.clusters.ray.conftest import local_ray
from torsh_distributed.clusters import JobState, Submission
from torsh_distributed.clusters.ray import RayEngine
from torsh_distributed.errors import CommunicationError, FeatureNotAvailable, InvalidArgument, IoError
from torsh_distributed.launch.spec import ElasticSpec, Entry

pytestmark = RAY

GROWING = Path(__file__).parents[1] / "grow_job.py"
SCRIPT = """
import os, sys, time
import torsh_distributed as td
td.init()
print("plan", os.environ.get("TORSH_PLAN", "none").rsplit("/", 1)[-1], "mine", os.environ["MINE"], flush=True)
td.barrier()
if sys.argv[1] == "fail" and td.rank() == 1:
    raise ValueError("from the script")
while sys.argv[1] == "stay":
    time.sleep(0.1)
print("done", td.rank(), flush=True)
"""


def submission(folder: Path, mode: str, **changes: Any) -> Submission:
    (folder / "job.py").write_text(SCRIPT)
    (folder / "plan.toml").write_text("[training]\nsteps = 3\n")
    values: dict[str, Any] = {
        "entry": Entry(target="job.py", args=(mode,)),
        "name": f"test-{mode}",
        "workers_per_node": 2,
        "working_dir": folder,
        "plan": folder / "plan.toml",
        "env": {"MINE": "secret"},
        **changes,
    }
    return Submission(**values)


def test_what_would_be_submitted_is_shown_without_values_of_variables(tmp_path: Path) -> None:
    shown = RayEngine({"placement": "SPREAD", "resources": "fast:2"}).render(submission(tmp_path, "ok"))
    job = json.loads(shown)["job"]
    assert job["num_workers"] == 2
    assert job["config"]["placement"] == "SPREAD"
    assert job["config"]["resources_per_worker"] == {"fast": 2.0}
    assert job["plan"] == ["plan.toml", "[training]\nsteps = 3\n"]
    assert "MINE" in job["env"]
    assert "secret" not in shown


def test_unknown_settings_and_absent_servers_are_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="no setting 'placment'"):
        RayEngine({"placment": "PACK"})
    with pytest.raises(InvalidArgument, match="must be yes or no"):
        RayEngine({"own_interpreters": "maybe"}).render(submission(tmp_path, "ok"))
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(IoError, match="the runtime environment cannot be read"):
        RayEngine({"runtime_env": str(tmp_path / "deep.json")}).render(submission(tmp_path, "ok"))
    with pytest.raises(CommunicationError, match="no Ray job server answers"):
        RayEngine({"address": "http://127.0.0.1:1"}).status("x")


@pytest.fixture(scope="module")
def job_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A Ray with its dashboard; the settings with which the engine finds it."""
    with local_ray(tmp_path_factory.mktemp("ray"), include_dashboard=True) as ray:
        url = ray.get_runtime_context().gcs_address and ray._private.worker.global_worker.node.webui_url
        yield {"address": f"http://{url}", "python": sys.executable}


@pytest.mark.matrix
@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_a_script_is_submitted_watched_and_cancelled(job_server: dict[str, str], tmp_path: Path) -> None:
    engine = RayEngine(job_server)
    assert engine.found_at() == {"address": job_server["address"]}
    good = engine.submit(submission(tmp_path, "ok"))
    lines = list(engine.logs(good, follow=True))
    assert engine.status(good).state is JobState.SUCCEEDED, lines
    assert {"[rank 0] done 0", "[rank 1] done 1", "[rank 0] plan plan.toml mine secret"} <= set(lines)

    bad = engine.submit(submission(tmp_path, "fail"))
    output = "\n".join(engine.logs(bad, follow=True))
    status = engine.status(bad)
    assert (status.state, status.exit_code) == (JobState.FAILED, 1)
    assert "rank 1 on Ray worker" in output
    assert "ValueError: from the script" in output

    many = engine.submit(submission(tmp_path, "many", workers_per_node=9))
    assert "has room for 4" in "\n".join(engine.logs(many, follow=True))
    assert engine.status(many).state is JobState.FAILED

    staying = engine.submit(submission(tmp_path, "stay"))
    for line in engine.logs(staying, follow=True):
        if "plan plan.toml" in line:
            break
    with pytest.raises(FeatureNotAvailable, match="cannot be changed"):
        engine.scale(staying, 3)
    engine.cancel(staying)
    assert engine.status(staying).state is JobState.CANCELLED
    deadline = time.monotonic() + 60
    while any(b"job.py\0stay" in path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()):
        assert time.monotonic() < deadline, "a rank of the cancelled job still runs"
        time.sleep(0.1)
    assert engine.status("never-submitted").state is JobState.LOST


@pytest.mark.matrix
@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_an_elastic_script_is_scaled(job_server: dict[str, str], tmp_path: Path) -> None:
    shutil.copy(GROWING, tmp_path)
    engine = RayEngine(job_server)
    job = engine.submit(
        submission(
            tmp_path,
            "grow",
            entry=Entry(target=GROWING.name, args=("2",)),
            workers_per_node=1,
            elastic=ElasticSpec(min_workers=1, max_workers=2),
        )
    )
    is_asked = False
    lines = []
    for line in engine.logs(job, follow=True):
        lines.append(line)
        if not is_asked and "two steps" in line:
            is_asked = True
            try:
                engine.scale(job, 2)
            except FeatureNotAvailable as error:
                raise AssertionError("\n".join([*lines, *engine.logs(job)])) from error
    assert engine.status(job).state is JobState.SUCCEEDED, lines
    assert any("ends with 2 workers" in line for line in lines)
