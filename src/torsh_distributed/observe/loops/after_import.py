"""Do something once a module has been imported, by any code: at once, or when that happens."""

from __future__ import annotations

import importlib.machinery
import inspect
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


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


LOADER_WORKERS_VARIABLE = "TORSH_LOADER_WORKERS"
"""Set by `torsh tune`: every DataLoader that loads in the training process gets so many processes instead."""

_LOADER = "torch.utils.data.dataloader"


def use_loader_workers(num_workers: int) -> None:
    """Give processes to the loaders of this process that have none, from now on or once torch's loader is imported.

    Batches and their order stay the same. An iterable dataset is left alone: each process would read all of it.
    """
    AfterImport(_LOADER, lambda module: _wrap(module.DataLoader, module.IterableDataset, num_workers))


def _wrap(kind: Any, iterable: type, num_workers: int) -> None:
    original = kind.__init__
    signature = inspect.signature(original)

    def with_workers(loader: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(loader, *args, **kwargs)
        is_alone = not given.arguments.get("num_workers")
        if is_alone and not isinstance(given.arguments.get("dataset"), iterable):
            given.arguments |= {"num_workers": num_workers, "persistent_workers": True}
        original(*given.args, **given.kwargs)

    kind.__init__ = with_workers
