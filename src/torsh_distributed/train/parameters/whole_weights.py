"""The weights of a model as one process has them, between two updates: to look at, or to change."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from torsh_distributed.comm.collectives.moves import broadcast
from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.state.whole_state import load_some_state, plain_name
from torsh_distributed.parallel.strategy import Strategy


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
    """Notices that a script changes parameters or gradients of which this rank holds pieces, or not all.

    An operation on each element would be right, but nobody can tell: a norm, a mean, an index or random numbers are
    those of the piece, and ranks drift apart.
    """

    def __init__(self, params: Iterable[nn.Parameter], axes: str) -> None:
        self._params, self._axes = list(params), axes
        self._versions: list[int] | None = None
        self._gradients: list[tuple[Tensor | None, int]] | None = None

    def note_params(self) -> None:
        """The Engine has updated them; what follows is not ours."""
        self._versions = [param._version for param in self._params]

    def forget_params(self) -> None:
        """The Engine itself changes them."""
        self._versions = None

    def check_params(self) -> None:
        """Before the next update."""
        was, self._versions = self._versions, None
        if was is not None and any(param._version != one for param, one in zip(self._params, was, strict=True)):
            raise self._refusal(
                "parameters were changed between two updates",
                "change them in `with engine.whole_weights(change=True) as weights:`, which gives whole ones",
            )

    def note_gradients(self) -> None:
        """Backward has computed them."""
        self._gradients = [_stamp(param.grad) for param in self._params]

    def check_gradients(self) -> None:
        """Before they are used."""
        was, self._gradients = self._gradients, None
        found = [_stamp(param.grad) for param in self._params]
        if was is not None and any(
            one is not other or number != now for (one, number), (other, now) in zip(was, found, strict=True)
        ):
            raise self._refusal(
                "gradients were changed between backward() and apply()",
                "let param.register_hook(…) change them, which gets whole ones; training.gradient_clipping limits the"
                " norm of all",
            )

    def _refusal(self, what: str, hint: str) -> InvalidArgument:
        return InvalidArgument(
            f"{what}, and under {self._axes} rank {process_group.rank()} holds only a part of them: a norm, a mean or"
            " random numbers would not be those of one process",
            hint=hint,
        )


def _stamp(gradient: Tensor | None) -> tuple[Tensor | None, int]:
    return gradient, -1 if gradient is None else gradient._version
