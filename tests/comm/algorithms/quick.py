from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from torsh_distributed.comm.algorithms import auto_choice


@contextmanager
def quick_choice() -> Iterator[None]:
    """`auto` decides after one round of two blocks: for what becomes of its choice, not for how good it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto_choice, "_SMALL_BLOCKS", 2)
        patch.setattr(auto_choice, "_MAX_ROUND_S", 0.0)
        yield
