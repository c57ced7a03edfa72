"""Our library under another library's name, in this process only.

Each library that can be stood in for has a module with two functions: `namespaces()`, the modules that scripts import
from it, by name, with what is in them; and `set_variables(environ)`, what its launcher would have set; and VERSION, the
release whose surface it is. `install` makes modules of the first. A real package of that name is hidden by
this choice alone, and that is said once. Libraries that ask for the package's metadata (transformers and Accelerate do)
get one that names this library as its author.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from torsh_distributed import known_variables
from torsh_distributed.errors import InvalidArgument

if TYPE_CHECKING:
    from importlib.metadata._meta import SimplePath

_log = logging.getLogger(__name__)

STAND_INS = {
    "deepspeed": "torsh_distributed.migrate.deepspeed.deepspeed_modules",
    "fairscale": "torsh_distributed.migrate.fairscale.fairscale_modules",
    "horovod": "torsh_distributed.migrate.horovod.horovod_modules",
}
"""The libraries that can be stood in for, with the module that says what is in them."""

_installed: dict[str, _MissingModules] = {}


def install(package: str) -> None:
    """Let `import PACKAGE` in this process find this library's stand-in; a second call does nothing.

    `torsh run --as PACKAGE` does it for every worker. Raises InvalidArgument for a library that is not known, and if
    the real one has been imported already.
    """
    if package in _installed:
        return
    if package not in STAND_INS:
        near = difflib.get_close_matches(package, STAND_INS, n=1)
        raise InvalidArgument(
            f"there is no stand-in for {package!r}",
            hint=f"did you mean {near[0]!r}?" if near else f"known: {', '.join(STAND_INS)}",
            package=package,
        )
    if package in sys.modules:
        raise InvalidArgument(
            f"{package} has been imported already, from {getattr(sys.modules[package], '__file__', 'elsewhere')}",
            hint=f"call install({package!r}) before the first `import {package}`",
            package=package,
        )
    hidden = importlib.util.find_spec(package)
    stand_in = importlib.import_module(STAND_INS[package])
    stand_in.set_variables(os.environ)
    namespaces: Mapping[str, Mapping[str, Any]] = stand_in.namespaces()
    for name, names in namespaces.items():
        module = ModuleType(name, f"{name}, as torsh_distributed provides it.")
        module.__path__ = []
        module.__spec__ = ModuleSpec(name, _InstalledLoader(), is_package=True)
        module.__dict__.update(names)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent and child not in namespaces.get(parent, {}):  # a function may have the name of its module
            setattr(sys.modules[parent], child, module)
    reasons: Mapping[str, str] = getattr(stand_in, "MISSING", {})
    _installed[package] = _MissingModules(package, list(namespaces), reasons, stand_in.VERSION)
    sys.meta_path.insert(0, _installed[package])
    # A folder of that name without an __init__.py, such as one of examples, is found too, but is not their package.
    if hidden is not None and hidden.origin is not None and known_variables.whole_number("RANK") == 0:
        _log.warning("the installed package %s (%s) is hidden by torsh_distributed's", package, hidden.origin)


def uninstall(package: str) -> None:
    """Take the stand-in away; the next import finds the real package, if there is one."""
    finder = _installed.pop(package, None)
    if finder is None:
        return
    sys.meta_path.remove(finder)
    for name in finder.known:
        sys.modules.pop(name, None)


class _InstalledLoader(Loader):
    """Loads a module that is in `sys.modules` already, unchanged: import asks for one after it found the spec."""

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    @override
    def exec_module(self, module: ModuleType) -> None:
        """It is complete."""


class _MissingModules:
    """Says which module of a library is not there, and which are; has the metadata of the stand-in's package."""

    def __init__(self, package: str, known: Sequence[str], reasons: Mapping[str, str], version: str) -> None:
        self._package = package
        self.known = known
        self._reasons = reasons
        self._metadata = _StandInMetadata(package, version)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith(f"{self._package}.") or _is_asked():
            return None
        reason = next(
            (why for start, why in self._reasons.items() if name == start or name.startswith(f"{start}.")), ""
        )
        has = reason or f"which has: {', '.join(self.known)}"
        raise ModuleNotFoundError(f"{name} is not part of torsh_distributed's {self._package}, {has}", name=name)

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterator[Distribution]:
        if context is None or context.name in (None, self._package):
            yield self._metadata


def _is_asked() -> bool:
    """Whether `importlib.util.find_spec` looks for the module, which says None for one that is not there."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_find_and_load":
        if frame.f_code is importlib.util.find_spec.__code__:
            return True
        frame = frame.f_back  # type: ignore[assignment]  # None above the first
    return False


class _StandInMetadata(Distribution):
    """What `importlib.metadata` finds of a stand-in: the version it stands for, and who provides it."""

    def __init__(self, package: str, version: str) -> None:
        self._text = (
            f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\nAuthor: torsh-distributed\n"
            f"Summary: torsh_distributed's stand-in for {package}, in this process only\n"
        )

    @override
    def read_text(self, filename: str) -> str | None:
        return self._text if filename == "METADATA" else None

    @override
    def locate_file(self, path: str | os.PathLike[str]) -> SimplePath:
        return Path(path)
