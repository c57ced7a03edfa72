"""Builds the compiled core of the shm backend where a C compiler and Python's headers are found.

Without them the install goes on: the backend then uses its portable core. One file serves every Python from 3.11 on
(the stable ABI), and no header of torch is needed, so any torch in range works with it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_PACKAGE = Path("src/torsh_distributed/comm/backends/shm")
_FLAGS = ("-std=c11", "-O3", "-fwrapv", "-ffp-contract=off", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden")


class CoreBuildHook(BuildHookInterface[Any]):
    """Compile the core into the package before a wheel, editable or not, is put together."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling; `version` is "standard" or "editable"."""
        if self.target_name != "wheel":
            return
        target = Path(self.root) / _PACKAGE / "_core.abi3.so"
        problem = build_core(Path(self.root) / _PACKAGE / "native", target)
        if problem:
            self.app.display_warning(f"the shm backend's compiled core was not built: {problem}")
            self.app.display_warning("the portable core will be used; it is correct, but several times slower")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        build_data["artifacts"].append(str(target.relative_to(self.root)))


def build_core(sources: Path, target: Path) -> str:
    """Compile `sources` into `target`; returns why it could not, or an empty string."""
    if sys.platform != "linux":
        return f"it needs Linux's futexes, this is {sys.platform}"
    compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or shutil.which("gcc") or ""]
    if not shutil.which(compiler[0]):
        return "no C compiler was found"
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").exists():
        return f"Python's headers are not in {include}"
    # Written beside and renamed: a process that has the old one mapped keeps it.
    fresh = target.with_suffix(".tmp")
    files = sorted(str(path) for path in sources.glob("*.c"))
    command = [*compiler, *_FLAGS, f"-I{include}", *files, "-o", str(fresh)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        fresh.unlink(missing_ok=True)
        return f"the compiler failed:\n{done.stderr.strip()}"
    fresh.replace(target)
    return ""
