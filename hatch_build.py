"""Builds the compiled parts if a C compiler and Python's headers are found.

Without them the install continues: each part has a portable version.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CoreBuildHook(BuildHookInterface[Any]):
    """Compiles the parts into the package before a wheel, editable or not, is assembled."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling; `version` is "standard" or "editable"."""
        if self.target_name != "wheel":
            return
        native = _load(Path(self.root) / "src/torsh_distributed/native.py")
        for part in native.COMPILED_MODULES:
            problem = native.build(part.sources, part.target)
            if problem:
                self.app.display_warning(f"{part.name} was not built: {problem}")
                self.app.display_warning(part.without_it)
            else:
                build_data["artifacts"].append(str(part.target.relative_to(self.root)))
        if not build_data["artifacts"]:
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def _load(path: Path) -> Any:
    """Import a module by its path: the package itself cannot be imported before it is built."""
    spec = importlib.util.spec_from_file_location("torsh_native", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
