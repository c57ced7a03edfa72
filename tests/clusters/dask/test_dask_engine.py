"""Scripts on a Dask cluster, by a driver beside its scheduler."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.clusters.dask.conftest import DaskProcesses
from tests.clusters.engine_marks import DASK
from torsh_distributed.clusters import JobState, Submission
from torsh_distributed.clusters.dask import DaskEngine
from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument
from torsh_distributed.launch.spec import Entry

pytestmark = DASK

SCRIPT = """
import os, sys, time
import torsh_distributed as td
td.init()
print("mine", os.environ["MINE"], flush=True)
td.barrier()
if sys.argv[1] == "fail" and td.rank() == 1:
    raise ValueError("from the script")
while sys.argv[1] == "stay":
    time.sleep(0.1)
print("done", td.rank(), flush=True)
"""


def submission(folder: Path, mode: str, **changes: Any) -> Submission:
    (folder / "job.py").write_text(SCRIPT)
    values: dict[str, Any] = {
        "entry": Entry(target="job.py", args=(mode,)),
        "name": f"test-{mode}",
        "workers_per_node": 2,
        "working_dir": folder,
        "env": {"MINE": "value"},
        **changes,
    }
    return Submission(**values)


def test_what_would_be_submitted_is_shown(tmp_path: Path) -> None:
    shown = json.loads(DaskEngine({"address": "tcp://127.0.0.1:1"}).render(submission(tmp_path, "ok")))
    assert shown["num_workers"] == 2
    assert shown["env"] == {"MINE": "…"}
    assert shown["working_dir"] == str(tmp_path)


def test_mistakes_are_said_before_anything_is_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match="no setting 'adress'"):
        DaskEngine({"adress": "tcp://127.0.0.1:1"})
    monkeypatch.delenv("DASK_SCHEDULER_ADDRESS", raising=False)
    with pytest.raises(InvalidArgument, match="the address of the Dask scheduler is not known"):
        DaskEngine().status("x")
    with pytest.raises(FeatureNotAvailable, match="Dask does not give out GPUs"):
        DaskEngine({"address": "tcp://127.0.0.1:1"}).submit(submission(tmp_path, "ok", gpus_per_worker=1))


@pytest.mark.matrix
@pytest.mark.ranks
def test_a_script_is_submitted_watched_and_cancelled(dask_set: tuple[DaskProcesses, Any], tmp_path: Path) -> None:
    processes, _ = dask_set
    engine = DaskEngine({"address": processes.address})
    assert engine.found_at() == {"address": processes.address}
    good = engine.submit(submission(tmp_path, "ok"))
    lines = list(engine.logs(good, follow=True))
    assert engine.status(good).state is JobState.SUCCEEDED, lines
    assert {"[rank 0] done 0", "[rank 1] done 1", "[rank 1] mine value"} <= set(lines)

    bad = engine.submit(submission(tmp_path, "fail"))
    output = "\n".join(engine.logs(bad, follow=True))
    status = engine.status(bad)
    assert (status.state, status.exit_code) == (JobState.FAILED, 1)
    assert "ValueError: from the script" in output

    with pytest.raises(FeatureNotAvailable, match="9 workers were asked for, and the Dask cluster has 2"):
        engine.submit(submission(tmp_path, "many", workers_per_node=9))

    staying = engine.submit(submission(tmp_path, "stay"))
    for line in engine.logs(staying, follow=True):
        if "mine value" in line:
            break
    assert engine.status(staying).state is JobState.RUNNING
    engine.cancel(staying)
    assert engine.status(staying).state is JobState.CANCELLED
    deadline = time.monotonic() + 60
    while any(b"job.py\0stay" in path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()):
        assert time.monotonic() < deadline, "a rank of the cancelled job still runs"
        time.sleep(0.1)
    assert engine.status("never-submitted").state is JobState.LOST
