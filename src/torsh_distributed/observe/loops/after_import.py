"""Do something once a module has been imported, by any code: at once, or when that happens."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


class AfterImport:
    """Calls `action` with the module named `name` as soon as it is there; `cancel` takes that back.

    A finder of `sys.meta_path` by its one method. It finds nothing else, and leaves when it has found its module.
    """

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._action = action
        module = sys.modules.get(name)
        spec = getattr(module, "__spec__", None)
        if module is not None and not getattr(spec, "_initializing", False):
            action(module)
        else:
            sys.meta_path.insert(0, self)

    def cancel(self) -> None:
        """Forget it, if the module has not come."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Only of the one module: its own, which acts after it is executed."""
        if name != self._name:
            return None
        self.cancel()
        # The finders after this one: another may wait for the same module.
        found = (finder.find_spec(name, path, target) for finder in list(sys.meta_path))
        spec = next((one for one in found if one is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute, action = spec.loader.exec_module, self._action

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            action(module)

        spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]  # of this one loader object
        return spec
