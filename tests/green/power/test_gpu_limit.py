"""Limits of GPUs, on a stand-in for the driver's library: refused by name, set, and put back though all are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.green.nvml_stand_in import StandIn

_CASES = """
import sys
from pathlib import Path
from torsh_distributed.green.power.gpu_limit import limit_gpus, restore_limits

numbers, record = Path(sys.argv[1]), Path(sys.argv[2])
limit = lambda: (numbers / "limit-0").read_text().strip()

def attempt(watts, visible=None):
    changed = limit_gpus(watts, visible=visible, record=record, note=print)
    print(changed, limit(), record.exists())

attempt(900.0)
(numbers / "busy-0").write_text("2")
attempt(400.0)
attempt(400.0, "")
(numbers / "busy-0").write_text("0")
(numbers / "locked").write_text("1")
attempt(400.0)
(numbers / "locked").write_text("0")
attempt(400.0, "GPU-stand-in-0")
restore_limits(record, note=print)
restore_limits(record, note=print)
print(limit(), record.exists())
"""


def test_a_limit_is_refused_by_name_or_set_and_put_back_to_what_was_found(tmp_path: Path) -> None:
    gpu = StandIn(tmp_path / "nvml")
    gpu.write("limit-0", 650_000)
    command = [sys.executable, "-c", _CASES, str(gpu.numbers), str(tmp_path / "record.json")]
    done = subprocess.run(
        command, env={**os.environ, **gpu.variables}, capture_output=True, text=True, timeout=60, check=False
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert "gpu 0 takes limits from 200 to 700 W" in lines[0]
    assert "in use by 2 other processes" in lines[2]
    assert "no GPU of NVIDIA's driver is here for this job" in lines[4]
    assert "does not let this user change gpu 0" in lines[6]
    assert [lines[at] for at in (1, 3, 5, 7)] == ["False 650000 False"] * 4
    assert "limited to 400 W; 650 W is put back" in lines[8]
    assert lines[9:] == ["True 400000 True", "650000 False"]


def wait_for_limit(gpu: StandIn, limit_mw: int, timeout_s: float = 60.0) -> None:
    deadline, pause = time.monotonic() + timeout_s, threading.Event()
    while gpu.read("limit-0") != limit_mw:
        assert time.monotonic() < deadline, f"the limit stays at {gpu.read('limit-0')} mW"
        pause.wait(0.02)


@pytest.mark.ranks
@pytest.mark.parametrize("victim", ["launcher", pytest.param("guardian too", marks=pytest.mark.matrix)])
def test_a_killed_launcher_leaves_the_limit_that_was_found(tmp_path: Path, victim: str) -> None:
    gpu = StandIn(tmp_path / "nvml")
    gpu.write("energy-0", 0)
    gpu.write("limit-0", 650_000)
    (tmp_path / "stay.py").write_text("import threading\nthreading.Event().wait(120)\n")
    (tmp_path / "plan.toml").write_text("[green]\nenabled = true\ngpu_limit_w = 400.0\n")
    command = [sys.executable, "-m", "torsh_distributed.cli.entry_point", "run", "--plan", str(tmp_path / "plan.toml")]
    launcher = subprocess.Popen(
        [*command, "--start-method", "spawn", str(tmp_path / "stay.py")],
        env={**os.environ, **gpu.variables},
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for_limit(gpu, 400_000)
        if victim == "guardian too":
            # A guardian that is killed is replaced; the next one knows all that this one knew.
            (guardian,) = [
                int(pid.name)
                for pid in Path("/proc").glob("[0-9]*")
                if _parent(pid) == launcher.pid and b"guardian.py" in _command(pid)
            ]
            os.kill(guardian, signal.SIGKILL)
            deadline = time.monotonic() + 30
            while not any(
                _parent(pid) == launcher.pid and b"guardian.py" in _command(pid) and int(pid.name) != guardian
                for pid in Path("/proc").glob("[0-9]*")
            ):
                assert time.monotonic() < deadline
        launcher.kill()
        wait_for_limit(gpu, 650_000)
    finally:
        launcher.kill()
        launcher.wait()


def _parent(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _command(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""
