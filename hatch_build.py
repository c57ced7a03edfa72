"""Builds the compiled core of the shm backend where a C compiler and Python's headers are found.

Without them the install goes on: the backend then uses its portable core.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CoreBuildHook(BuildHookInterface[Any]):
    """Compile the core into the package before a wheel, editable or not, is put together."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling; `version` is "standard" or "editable"."""
        if self.target_name != "wheel":
            return
        builder = _load(Path(self.root) / "src/torsh_distributed/comm/backends/shm/build.py")
        problem = builder.build()
        if problem:
            self.app.display_warning(f"the shm backend's compiled core was not built: {problem}")
            self.app.display_warning("the portable core will be used; it is correct, but several times slower")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        build_data["artifacts"].append(str(builder.TARGET.relative_to(self.root)))


def _load(path: Path) -> Any:
    """A module by its path: the package itself cannot be imported before it is built."""
    spec = importlib.util.spec_from_file_location("shm_build", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
