"""Workers forked from the warm spare: children of the launcher, with their own output, environment and exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torsh_distributed.launch.control.spare_process import SpareProcess
from torsh_distributed.launch.local.failure_report import LauncherOutput
from torsh_distributed.launch.local.guardian import Guardian
from torsh_distributed.launch.local.loop import Loop
from torsh_distributed.launch.local.terminal import Terminal
from torsh_distributed.launch.local.worker_line import WorkerLine

pytestmark = pytest.mark.ranks

SCRIPT = """\
import os, sys
assert "torch._dynamo" in sys.modules, "every worker would import it when it makes an optimizer"
import torch
from torsh_distributed.launch.worker.raised_error import places_of
print(os.environ["COLOUR"], os.getsid(0) == os.getpid(), sys.argv[1])
print(*(os.path.basename(file) for file, _, _ in places_of(sys._getframe())))
sys.exit(5)
"""


def test_a_forked_worker_is_like_any_other(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(SCRIPT)
    beside = subprocess.Popen([sys.executable, "-c", "import torch, sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    heard: list[dict[str, object]] = []
    guardian = Guardian("test")
    with Loop() as loop, Terminal() as terminal:
        spare = SpareProcess(loop, guardian, LauncherOutput(terminal), variables={"OMP_NUM_THREADS": "1"})
        try:
            assert spare.start(["python", "-u", "start", str(script)], {}, stdout=1, stderr=2, line=0) is None
            spare.keep_warm_beside([beside.pid])

            def look() -> None:
                if spare.is_warm:
                    loop.stop(0)
                else:
                    loop.call_later(0.05, look)

            look()
            loop.call_later(60.0, lambda: loop.stop(1))
            assert loop.run() == 0, "the spare did not get warm"
            line = WorkerLine(loop, heard.append)
            reading, writing = os.pipe()
            worker = spare.start(
                [sys.executable, "-u", "worker_start.py", str(script), "argument"],
                {**os.environ, "COLOUR": "green"},
                stdout=writing,
                stderr=writing,
                line=line.worker_fd,
            )
            assert worker is not None
            os.close(writing)
            line.close_worker_end()
            with os.fdopen(reading) as output:
                said = output.read()
            assert worker.wait(timeout=30) == 5, said
            assert said.splitlines() == ["green True argument", "worker.py"]
            line.drain()
            assert next(message["type"] for message in heard) == "hello", json.dumps(heard)
            line.close()
        finally:
            spare.close()
            beside.communicate(b"")
            guardian.close()
    assert spare.pid is None
