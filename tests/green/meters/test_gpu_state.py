from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.green.nvml_stand_in import StandIn

_SCRIPT = """
import dataclasses, json
from torsh_distributed.green.meters.node_meter import NodeMeter

meter = NodeMeter([0], now_s=0.0)
for second in (1.0, 2.0):
    reading = next(one for one in meter.read(second) if one.meter == "gpu 0")
print(json.dumps([dataclasses.asdict(reading.state), meter.notes]))
"""


def told_by(gpu: StandIn, *before: str) -> tuple[dict[str, object], list[str]]:
    """What a job's process hears of the stand-in."""
    started = [sys.executable, "-c", "\n".join(before) + _SCRIPT]
    variables = {**os.environ, **gpu.variables}
    done = subprocess.run(started, env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    state, notes = json.loads(done.stdout)
    return state, notes


_WRITES = "import os, pathlib; pathlib.Path(os.environ['NVML_STAND_IN'], 'processes-0').write_text({text})"


def test_another_job_on_the_gpu_is_counted_and_the_share_of_computing_time_is_told(tmp_path: Path) -> None:
    gpu = StandIn(tmp_path / "nvml")
    for name, number in (("energy-0", 1000), ("celsius-0", 61), ("use-0", 40)):
        gpu.write(name, number)
    # The process itself, and the machine's first, which descends from nothing.
    state, notes = told_by(gpu, _WRITES.format(text="f'{os.getpid()} 30\\n1 10\\n'"))
    assert state == {"utilization": 0.4, "celsius": 61.0, "num_others": 1, "own_share": 0.75}
    assert sum("is shared with another job" in note for note in notes) == 1


def test_a_gpu_of_this_job_alone_is_not_called_shared(tmp_path: Path) -> None:
    gpu = StandIn(tmp_path / "nvml")
    gpu.write("energy-0", 1000)
    state, notes = told_by(gpu, _WRITES.format(text="f'{os.getpid()} 30\\n'"))
    assert state == {"utilization": None, "celsius": None, "num_others": 0, "own_share": None}
    assert not any("is shared" in note for note in notes)


_WORKER_ENDS = """
import os, pathlib, subprocess, sys
from torsh_distributed.green.meters.node_meter import NodeMeter

numbers = pathlib.Path(os.environ["NVML_STAND_IN"], "processes-0")
worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
numbers.write_text(f"{worker.pid} 30")
meter = NodeMeter([0], now_s=0.0)
before = meter.read(1.0)[0].state
worker.communicate(b"\\n")
print(before.num_others, meter.read(2.0)[0].state.num_others)
"""


def test_a_worker_that_has_ended_is_not_another_job(tmp_path: Path) -> None:
    gpu = StandIn(tmp_path / "nvml")
    gpu.write("energy-0", 1000)
    command, variables = [sys.executable, "-c", _WORKER_ENDS], {**os.environ, **gpu.variables}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["0", "0"], done.stderr


def test_processes_with_numbers_of_another_namespace_are_nobodys(tmp_path: Path) -> None:
    gpu = StandIn(tmp_path / "nvml")
    gpu.write("energy-0", 1000)
    gpu.write_processes(0, {4_000_000_001: 30, 4_000_000_002: 30})
    state, _ = told_by(gpu)
    assert (state["num_others"], state["own_share"]) == (0, None)
