"""Programs that need a process of their own, but not another import of torch: `world.outcomes(be_program, path, …)`."""

from __future__ import annotations

import os
import runpy
import sys
import warnings
from pathlib import Path

_OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def be_program(path: Path) -> None:
    """Runs on a rank: be what `python path` would be. Raises what the program raises, SystemExit unless it says 0."""
    for name in _OF_A_LAUNCHER:
        del os.environ[name]
    os.chdir(path.parent)
    sys.argv[:] = [str(path)]
    sys.path[0] = str(path.parent)
    warnings.filterwarnings("error", category=DeprecationWarning, module="__main__")
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise
