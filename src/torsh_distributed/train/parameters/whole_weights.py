"""The weights of a model as one process has them, between two updates: to look at, or to change."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from torsh_distributed.comm.collectives.moves import broadcast
from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.state.whole_state import load_some_state, plain_name
from torsh_distributed.parallel.strategy import Strategy

_log = logging.getLogger(__name__)


@contextmanager
def whole_weights(strategy: Strategy, patterns: tuple[str, ...], *, change: bool) -> Iterator[dict[str, Tensor]]:
    """The parameters whose names match one of `patterns`, or all; a shared one once, under its first name.

    With `change`, the first rank's go back into the model.
    """
    shared = strategy.shared_names()
    params = {plain_name(name) for name, _ in strategy.whole_model.named_parameters(remove_duplicate=False)}
    chosen = {
        shared.get(name, name)
        for name in params
        if not patterns or any(fnmatch.fnmatchcase(name, one) for one in patterns)
    }
    found = {name: value for name, value in strategy.whole_tensors() if name in chosen}
    if not found:
        raise InvalidArgument(
            "no weight has such a name",
            hint="patterns are those of a shell: 'blocks.*.weight'",
            patterns=patterns,
            names=sorted(params)[:3],
        )
    versions = [value._version for value in found.values()]
    with torch.no_grad():
        yield found
        if not change:
            changed = [
                name for (name, value), was in zip(found.items(), versions, strict=True) if value._version != was
            ]
            if changed:
                raise InvalidArgument(
                    f"{changed[0]} was changed, and not every rank would keep that",
                    hint="write whole_weights(…, change=True)",
                    changed=changed[:3],
                )
            return
        if process_group.world_size() > 1:
            for value in found.values():
                broadcast(value, 0)
        further = {name: found[first] for name, first in shared.items() if first in found}
        load_some_state(strategy.whole_model, {**found, **further}, strategy.state_parts())


class EditedPieces:
    """Warns once if a user changes parameters between steps of which this rank holds pieces, or not all.

    An operation on each element is right there; a norm, a mean, an index or random numbers are those of the piece.
    """

    def __init__(self, params: Iterable[nn.Parameter], axes: str) -> None:
        self._params, self._axes = list(params), axes
        self._versions: list[int] | None = None

    def note(self) -> None:
        """What follows is not ours."""
        self._versions = [param._version for param in self._params]

    def forget(self) -> None:
        """The Engine itself has changed them."""
        self._versions = None

    def check(self) -> None:
        """Before the next forward."""
        was, self._versions = self._versions, None
        if was is None or all(param._version == one for param, one in zip(self._params, was, strict=True)):
            return
        self._params = []
        _log.warning(
            "parameters were changed between two steps, and under %s rank %d holds only a part of them: what is more"
            " than an operation on each element (a norm, a mean, rows, random numbers) differs from one process;"
            " change them in `with engine.whole_weights(change=True) as weights:`",
            self._axes,
            process_group.rank(),
        )
