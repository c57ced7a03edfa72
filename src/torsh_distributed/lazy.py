"""Lazy exports: a package offers the names of its `__init__.pyi` and imports their modules on first use.

Why: importing all modules takes more than a second, which `import torsh_distributed` must not cost. Type checkers read
the stub, and so does this module, so each name is written once.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable


def exports(package: str) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """`__all__`, `__getattr__` and `__dir__` of `package`, from the imports in the `__init__.pyi` beside its file.

    `from package.module import name as name` there means: import that module when `name` is first used. Python calls
    `__getattr__` only for names that the package does not have yet.
    """
    module = sys.modules[package]
    assert module.__file__ is not None, "a package with a stub has a file"
    homes = _homes(module.__file__ + "i")

    def get(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if homes[name] == package:
            return importlib.import_module(f"{package}.{name}")
        value: object = getattr(importlib.import_module(homes[name]), name)
        setattr(module, name, value)
        return value

    return sorted(homes), get, lambda: sorted({*vars(module), *module.__all__})


def _homes(stub: str) -> dict[str, str]:
    """Each name to the module that the stub imports it from.

    A stub has one name a line, as the formatter leaves it; splitting lines is faster than importing a parser.
    """
    with open(stub) as lines:  # noqa: PTH123  # pathlib takes 6 ms to import
        words = [line.split() for line in lines if line.startswith("from ")]
    return {name: module for _, module, _, name, *_ in words}
