from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from torsh_distributed.comm.algorithms.auto import choice


@contextmanager
def quick_choice() -> Iterator[None]:
    """`auto` decides after one round of two blocks: for what becomes of its choice, not for how good it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "_SMALL_BLOCKS", 2)
        patch.setattr(choice, "_MAX_ROUND_S", 0.0)
        yield
