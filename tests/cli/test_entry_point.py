"""Ctrl-C while a job starts: one line, exit status 130, no traceback, and nothing stays."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bed.warm_programs import Started
from tests.launch.jobs import still_running

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]

SCRIPT = """
import os, sys
sys.stderr.flush()
open(os.path.join(sys.argv[1], "script-" + os.environ["RANK"]), "w").close()
import torch
import torsh_distributed as td
open(os.path.join(sys.argv[1], "torch-" + os.environ["RANK"]), "w").close()
td.init()
while True:
    td.all_reduce(torch.ones(10))
"""


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def maps_torch(pid: int) -> bool:
    try:
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


MOMENTS: dict[str, Callable[[int, Path], bool]] = {
    "the command line is imported": lambda pid, _: "_json" in Path(f"/proc/{pid}/maps").read_text(),
    "the first process is started": lambda pid, _: bool(children(pid)),
    "a worker runs the script": lambda _, folder: (folder / "script-0").exists(),
    "a worker imports torch": lambda pid, _: any(map(maps_torch, children(pid))),
    "a worker has torch": lambda _, folder: (folder / "torch-1").exists(),
}


def test_ctrl_c_before_the_package_is_imported_is_quiet(tmp_path: Path) -> None:
    package = tmp_path / "torsh_distributed"
    package.mkdir()
    (package / "__init__.py").write_text("import signal\nprint(1, flush=True)\nwhile True:\n    signal.pause()\n")
    module, _, function = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["torsh"].partition(
        ":"
    )
    shutil.copy(ROOT / "src" / f"{module}.py", tmp_path)
    command = subprocess.Popen(
        [sys.executable, "-c", f"from {module} import {function}; {function}()", "run", "train.py"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert command.stdout is not None
    command.stdout.readline()
    command.send_signal(signal.SIGINT)
    _, err = command.communicate(timeout=60)
    assert (command.returncode, err) == (130, "torsh: interrupted\n")


@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_while_a_job_starts_is_quiet(moment: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    job = Started(  # the start itself is looked at
        [
            sys.executable,
            "-m",
            "torsh_distributed.cli.entry_point",
            "run",
            "--nproc-per-node",
            "2",
            str(script),
            str(tmp_path),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        deadline = time.monotonic() + 60
        while not MOMENTS[moment](job.pid, tmp_path):
            assert job.poll() is None, job.communicate()
            assert time.monotonic() < deadline, f"never: {moment}"
            time.sleep(0.002)
        os.killpg(job.pid, signal.SIGINT)
        out, err = job.communicate(timeout=60)
    finally:
        job.kill()
        job.wait()
    assert job.returncode == 130, err
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert "SIGINT" in err or err == "torsh: interrupted\n"
    assert still_running(tmp_path, timeout_s=5.0) == []
