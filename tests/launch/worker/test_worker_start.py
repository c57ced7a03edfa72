"""A worker that the launcher asks for its stacks answers, and is never ended by the question."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from torsh_distributed.launch.worker import worker_start

# Asks on and on, until the worker is gone: also while Python takes its handlers away at the end.
_ASKING = """
import os, sys, time
end = time.monotonic() + 30
while time.monotonic() < end:
    try:
        os.kill(int(sys.argv[1]), int(sys.argv[2]))
    except ProcessLookupError:
        break
    time.sleep(0.0002)
"""
_ENDING = f"""
import os, subprocess, sys
question = [sys.executable, "-c", {_ASKING!r}, str(os.getpid()), {str(int(worker_start.STACK_SIGNAL))!r}]
subprocess.Popen(question, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
path = os.environ["TORSH_PROGRESS_FILE"] + ".threads"
while not os.path.getsize(path):  # until it has asked
    pass
print("done")
"""


def test_a_question_that_comes_at_the_end_of_a_worker_does_not_end_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_ENDING)
    env = {**os.environ, "TORSH_PROGRESS_FILE": str(tmp_path / "progress")}
    env.pop("PYTHONFAULTHANDLER", None)
    command = [sys.executable, worker_start.__file__, str(script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert "train.py" in (tmp_path / "progress.threads").read_text()
