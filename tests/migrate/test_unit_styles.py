"""Short scripts pass on two ranks, with the losses of plain torch.

In the style of DeepSpeed's own unit tests, and of PyTorch-Ignite's examples on Horovod.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.matrix, pytest.mark.ranks]

STYLES = Path(__file__).parent / "styles"


@pytest.mark.parametrize(
    ("library", "script"),
    [
        ("deepspeed", "training"),
        ("deepspeed", "around"),
        pytest.param("horovod", "ignite_on_horovod", marks=pytest.mark.needs_library("ignite")),
    ],
)
def test_every_case_of_a_script_passes(library: str, script: str) -> None:
    path = STYLES / "units" / f"{script}.py"
    torsh = [sys.executable, "-m", "torsh_distributed.cli.entry_point", "run", "--as", library]
    here = {**os.environ, "PYTHONPATH": str(STYLES / "shared")}
    words = [*torsh, "--nproc-per-node", "2", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=110, env=here)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = re.findall(r"^def case_(\w+)", path.read_text(), re.MULTILINE)
    assert re.findall(r"passed (\w+)$", done.stdout, re.MULTILINE) == cases
