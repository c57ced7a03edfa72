"""DeepSpeed itself, to compare with: installed aside in build/deepspeed, in ranks only, without its compiled parts.

It is no dependency. To install it: `INSTALL` below. Functions that `world.run` starts call `use_deepspeed()` first.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "build" / "deepspeed"
INSTALL = (
    "DS_BUILD_OPS=0 pip install --no-build-isolation --no-deps --target build/deepspeed -r benchmarks/deepspeed.txt"
)


def use_deepspeed() -> Any:
    """The real package, imported in this rank on the CPU; nothing of it is compiled. Any: it has no types."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if str(PLACE) not in sys.path:
        sys.path.append(str(PLACE))
    deepspeed = importlib.import_module("deepspeed")
    operations = importlib.import_module("deepspeed.ops")
    # It asks the compiler what it could build, and builds that when ranks meet, which takes minutes: nothing.
    operations.__dict__["__compatible_ops__"] = defaultdict(bool)
    # It refuses fp16 where oneDNN has no instructions for it, as on most x86 machines; torch computes in it anyway.
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    return deepspeed


def can_be_installed(package: str = "deepspeed") -> bool:
    """Whether pip reaches an index that has it, or another package that is installed aside."""
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", package, "--retries", "0", "--timeout", "5"],
        capture_output=True,
        check=False,
    )
    return asked.returncode == 0
