"""What runs first in a worker's Python: nothing to notice, until torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from torsh_distributed.launch.local.worker_variables import STARTUP_DIRECTORY


def python(code: str, *folders: Path, options: tuple[str, ...] = ()) -> str:
    path = os.pathsep.join(map(str, (STARTUP_DIRECTORY, *folders)))
    command = [sys.executable, *options, "-c", code]
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True, timeout=60
    ).stdout


def test_torch_is_preceded_by_us_and_nothing_else_is() -> None:
    code = """
import importlib.util, sys
print("torsh_distributed" in sys.modules, "torch" in sys.modules)
importlib.util.find_spec("torch")
print("torsh_distributed" in sys.modules, "torch" in sys.modules)
"""
    assert python(code) == "False False\nTrue False\n"


def test_the_sitecustomize_that_it_hides_runs_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nprint('hidden', __name__, 'ours' in sys.modules)\n")
    found = python("import sys, sitecustomize; print(sitecustomize.__file__)", tmp_path)
    assert found == f"hidden sitecustomize False\n{tmp_path}/sitecustomize.py\n"


def test_its_folder_is_no_place_to_import_from() -> None:
    assert python("import sys; print(sys.path)").count(str(STARTUP_DIRECTORY)) == 0


def test_an_interpreter_without_us_is_left_alone() -> None:
    code = "import importlib.util, sys; print(importlib.util.find_spec('torch'), 'torsh_distributed' in sys.modules)"
    bare = f"import runpy, sys; sys.path.insert(0, {str(STARTUP_DIRECTORY)!r}); import sitecustomize; exec({code!r})"
    assert python(bare, options=("-I", "-S")) == "None False\n"
