"""Faults from the environment, in scripts that know nothing of them: installed once torch is imported.

The sitecustomize of workers asks for `torch_spec` where TORSH_FAULTS or TORSH_FAULT_LOG is set. It works under any
launcher whose workers inherit PYTHONPATH; `torsh chaos` sets it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from typing_extensions import override

from torsh_distributed.elastic.faults.fault import LOG_VARIABLE, faults_from_environment


def torch_spec(path: Any = None) -> importlib.machinery.ModuleSpec | None:
    """How to import torch so that faults are installed right after it; None if there is no torch."""
    spec = importlib.machinery.PathFinder.find_spec("torch", path)
    if spec is not None and spec.loader is not None:
        spec.loader = _ThenInstall(spec.loader)
    return spec


def install_faults() -> None:
    """Watch for the environment's faults, for the rest of this process."""
    from torsh_distributed.elastic.faults.injector import Injector
    from torsh_distributed.elastic.faults.torch_points import TorchPoints

    log = os.environ.get(LOG_VARIABLE)
    TorchPoints().install()
    Injector(faults_from_environment(os.environ), log=None if log is None else Path(log)).watch()


class _ThenInstall(importlib.abc.Loader):
    """A loader that leaves no trace of itself on the module."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    @override
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    @override
    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        install_faults()
