"""Names that a package offers without importing their modules: each is written once, in the package's `__init__.pyi`.

Why: `import torsh_distributed` must not cost the second that all of its modules take, and type checkers need to see
what the names are. They read the stub; so does this module, when the package is imported.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path


def exports(package: str) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """`__all__`, `__getattr__` and `__dir__` of `package`, from the imports of the `__init__.pyi` beside its file.

    `from package.module import name as name` there means: import that module when `name` is first used. What the
    package has already, such as a submodule that was imported, never comes here.
    """
    module = sys.modules[package]
    assert module.__file__ is not None, "a package with a stub has a file"
    homes = _homes(Path(module.__file__).with_suffix(".pyi"))

    def get(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if homes[name] == package:
            return importlib.import_module(f"{package}.{name}")
        value: object = getattr(importlib.import_module(homes[name]), name)
        setattr(module, name, value)
        return value

    return sorted(homes), get, lambda: sorted({*vars(module), *homes})


def _homes(stub: Path) -> dict[str, str]:
    """Name to the module that the stub imports it from."""
    return {
        alias.name: statement.module
        for statement in ast.parse(stub.read_text()).body
        if isinstance(statement, ast.ImportFrom) and statement.module
        for alias in statement.names
    }
