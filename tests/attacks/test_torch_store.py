"""What `--torch-store` gives away, as the guide says, and what it does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.victim import NOBODY

pytestmark = [pytest.mark.needs_netns, pytest.mark.ranks]

SCRIPT = """
import json, os, sys, time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
import torsh_distributed as td

folder = Path(sys.argv[1])
rank = int(os.environ["RANK"])
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
if rank == 0:
    store.set("note", "of the job")
    store.set("gone", "soon")
    secrets = [os.environ["TORSH_SECRET_FILE"], f"/proc/{os.getpid()}/environ", f"/proc/{os.getpid()}/mem"]
    facts = {"store": [os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])], "secrets": secrets}
    (folder / "facts.part").write_text(json.dumps(facts))
    (folder / "facts.part").rename(folder / "facts")
while not (folder / "attacked").exists():
    time.sleep(0.01)
value = ""
try:
    import torch

    td.init(timeout_s=20)
    total = torch.ones(4)
    td.all_reduce(total)
    value = total.tolist()
except Exception as error:
    value = f"{type(error).__name__}: {error}"
(folder / f"report-{rank}").write_text(json.dumps({"note": store.get("note").decode(), "result": value}))
"""


def attack(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    """What the stranger got, how it went on in the job, and what the launcher said."""
    (folder / "victim.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torsh_distributed.run", "--nproc-per-node", "2", "--torch-store"]
    job = subprocess.Popen(
        [*command, str(folder / "victim.py"), str(folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        deadline = time.monotonic() + 60
        while not (folder / "facts").exists():
            assert time.monotonic() < deadline
            assert job.poll() is None, job.communicate()[0]
            time.sleep(0.02)
        with tempfile.TemporaryDirectory() as scratch:
            Path(scratch).chmod(0o777)
            facts = json.loads((folder / "facts").read_text()) | {
                "uid": NOBODY.pw_uid,
                "gid": NOBODY.pw_gid,
                "note": "of the job",
                "scratch": scratch,
                "segment": "/torsh/0/c10d/0//cpu//node/0/shm/1/segment/0",
            }
            source = Path(__file__).with_name("torch_store.py").read_text()
            stranger = subprocess.Popen(
                [os.path.realpath(sys.executable), "-I", "-S", "-c", source],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert stranger.stdin is not None
            assert stranger.stdout is not None
            stranger.stdin.write(json.dumps(facts))
            stranger.stdin.close()
            got = json.loads(stranger.stdout.readline())
            (folder / "attacked").touch()
            output, _ = job.communicate(timeout=60)
            stranger.kill()
            stranger.wait(timeout=10)
            stranger.stdout.close()
            assert (Path(scratch) / "mine").read_bytes().count(0) == 1 << 20, "the stranger's file was written"
    finally:
        if job.poll() is None:
            job.kill()
            job.communicate(timeout=30)
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("report-*"))]
    return got, reports, output


def test_a_stranger_has_the_keys_and_nothing_else(tmp_path: Path) -> None:
    got, reports, output = attack(tmp_path)
    # This is what the guide says it costs.
    assert got["keys counted"] >= 2
    assert got["key read"] == "of the job"
    assert got["key written"] == "of a stranger"
    assert got["key deleted"] == 1
    assert [report["note"] for report in reports] == ["of a stranger"] * 2
    assert "--torch-store: torch's store asks for no secret" in output
    # And this is what it must not.
    assert got["process files read"] == 0
    # A planted segment can keep the ranks from meeting, but none of them maps the stranger's file: see `attack`.
    for report in reports:
        assert report["result"] == [2.0] * 4 or "not signed with the job's secret" in report["result"], reports
