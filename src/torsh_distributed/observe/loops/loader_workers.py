"""Loaders with processes that the script did not ask for: how `torsh tune` tries what that would bring."""

from __future__ import annotations

import inspect
from typing import Any

from torsh_distributed.observe.loops.after_import import AfterImport

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
