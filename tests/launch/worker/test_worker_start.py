"""A worker's first steps: it answers when asked for its stacks, and heeds a Ctrl-C wherever it comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from torsh_distributed.launch.worker import worker_start

pytestmark = pytest.mark.ranks

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


# Torch's native code imports it first, clears what it raises, and goes on without.
_FAKE_NUMPY = """
import os, signal, sys
if not os.path.exists(sys.argv[1]):
    open(sys.argv[1], "w").close()
    os.kill(os.getpid(), signal.SIGINT)
    print("not interrupted", flush=True)
    import this
raise ModuleNotFoundError("not the real one")
"""


def test_an_interrupt_while_torchs_native_code_runs_python_comes_at_the_next_import(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text(_FAKE_NUMPY)
    script = tmp_path / "train.py"
    script.write_text("import torch\nprint('went on')\n")
    command = [sys.executable, worker_start.__file__, str(script), str(tmp_path / "imported")]
    worker = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (worker.returncode, worker.stdout) == (-signal.SIGINT, "not interrupted\n"), worker.stderr
    assert worker.stderr.splitlines()[-1] == "KeyboardInterrupt"


def test_ctrl_c_is_pythons_own_once_torch_is_imported(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import signal, torch\nprint(signal.getsignal(signal.SIGINT) is signal.default_int_handler)\n")
    command = [sys.executable, worker_start.__file__, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
