"""Under stage 2 scripts save `engine.module.state_dict()`: it has whole tensors, though parameters are shards here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from torsh_distributed.parallel.state.whole_state import whole


class WholeStateDict:
    """Gathers the shards in what `module.state_dict()` returns; every rank calls that then, as for any gather.

    This library's own code reads shards as they are, in `paused()`.
    """

    def __init__(self, module: nn.Module) -> None:
        self._is_paused = False

        def gather(_: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
            self._gather(state, prefix)

        # A function, not a method: torch puts a mark on it.
        module.register_state_dict_post_hook(gather)  # type: ignore[no-untyped-call]  # untyped in torch

    def _gather(self, state: dict[str, Any], prefix: str) -> None:
        if self._is_paused or prefix:
            return
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = whole(value.detach())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """In the `with` block state is as it is held."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before
