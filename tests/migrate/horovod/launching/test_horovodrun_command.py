"""`horovodrun`, as its users type it, is `torsh run --as horovod`."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.bed.world import ROOT

pytestmark = pytest.mark.ranks

SCRIPT = """
import sys
import horovod.torch as hvd
hvd.init()
print(hvd.rank(), "of", hvd.size(), sys.argv[1:])
"""


def horovodrun(*words: str) -> subprocess.CompletedProcess[str]:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["horovodrun"].partition(":")
    call = f"import sys; from {module} import {function}; sys.exit({function}())"
    return subprocess.run([sys.executable, "-c", call, *words], capture_output=True, text=True, timeout=100)


def test_a_line_of_horovodrun_runs(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = horovodrun("-np", "2", "-H", "localhost:2", "python", str(script), "--lr", "1")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] {rank} of 2 ['--lr', '1']" for rank in range(2)]


@pytest.mark.parametrize(("flag", "answer"), [("--version", "torsh"), ("-cb", "torch")])
def test_questions_are_answered(flag: str, answer: str) -> None:
    done = horovodrun(flag)
    assert done.returncode == 0, done.stderr
    assert answer in done.stdout
