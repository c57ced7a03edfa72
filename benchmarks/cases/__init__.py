"""The cases, one module each: a new file here is a new case, under the name of the file."""

from __future__ import annotations

import importlib
import pkgutil

from benchmarks.harness import Case


def case_names() -> list[str]:
    """All cases."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load_case(name: str) -> Case:
    """Import the module of a case and take its `CASE`."""
    case = importlib.import_module(f"{__name__}.{name}").CASE
    if not isinstance(case, Case):
        raise TypeError(f"benchmarks/cases/{name}.py must define CASE, an instance of Case")
    return case
