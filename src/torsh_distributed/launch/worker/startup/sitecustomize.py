"""Runs first in every Python process of a worker, so torch's `env://` finds the job's store in scripts without us.

Importing torch then imports torsh_distributed first, which adds what torch has to know, and the faults that
TORSH_FAULTS asks for; programs without torch do not notice. Under `torsh run --as LIBRARY` the first import of that
library finds this one's stand-in. Another interpreter, which has no torsh_distributed, is left alone. The sitecustomize
that this one hides runs too.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType

_NAME = "sitecustomize"
_LINE = "torsh_distributed.launch.worker.launcher_line"
_RECORDING = "torsh_distributed.launch.worker.recording.event_recording"
_WANTS = ("TORSH_EVENTS_DIR", "TORSH_METRICS")
"""Set in workers whose launcher wants to know what they measure; a script without us says nothing else."""


class _BeforeTorch:
    """Imports torsh_distributed when torch is first looked for; finds nothing itself."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "torch":
            sys.meta_path.remove(self)
            if importlib.util.find_spec("torsh_distributed") is not None:
                importlib.import_module("torsh_distributed")
                if any(os.environ.get(name) for name in _WANTS) and _LINE in sys.modules:
                    importlib.import_module(_RECORDING).record_as_asked()
                if any(os.environ.get(name) for name in ("TORSH_FAULTS", "TORSH_FAULT_LOG")):
                    from torsh_distributed import upward

                    found: importlib.machinery.ModuleSpec | None = upward.load(upward.FAULTS)()
                    return found
        return None


class _StandInFinder:
    """Installs the stand-in for a library when that library is first looked for."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._package:
            return None
        sys.meta_path.remove(self)
        from torsh_distributed import upward

        upward.load(upward.STAND_IN)(name)
        return importlib.machinery.ModuleSpec(name, _Installed(), is_package=True)  # type: ignore[arg-type]  # a loader by its methods


class _Installed:
    """Loads a module that is in `sys.modules` already, unchanged."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """It is complete."""


def _run_hidden(here: str) -> None:
    """Run the sitecustomize that would have been found without ours."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]  # noqa: PTH100 - no pathlib this early
    spec = importlib.machinery.PathFinder.find_spec(_NAME, sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules[_NAME] = module
        spec.loader.exec_module(module)


if __name__ == _NAME:
    sys.meta_path.insert(0, _BeforeTorch())
    if os.environ.get("TORSH_RUN_AS"):
        sys.meta_path.insert(0, _StandInFinder(os.environ["TORSH_RUN_AS"]))
    _run_hidden(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
