"""The form of attention over split sequences follows what was measured."""

from __future__ import annotations

from functools import partial
from typing import Any

from torsh_distributed.parallel.context.form import choose_form
from torsh_distributed.parallel.context.position_mask import PositionMask

CAUSAL = PositionMask(is_causal=True)


def in_window(size: int, batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (key <= query) & (key > query - size)


def test_heads_are_exchanged_where_they_divide() -> None:
    assert choose_form("auto", heads=8, size=4, length=4096, mask=CAUSAL) == "ulysses"
    assert choose_form("auto", heads=6, size=4, length=4096, mask=CAUSAL) == "ring"
    assert choose_form("ring", heads=8, size=4, length=4096, mask=CAUSAL) == "ring"


def test_a_ring_skips_what_a_window_hides_in_long_sequences() -> None:
    mask = PositionMask(allowed=partial(in_window, 256))
    assert choose_form("auto", heads=8, size=4, length=1024, mask=mask) == "ring"
    assert choose_form("auto", heads=8, size=4, length=512, mask=mask) == "ulysses"
    assert choose_form("auto", heads=8, size=4, length=1024, mask=mask, dropout_p=0.1) == "ulysses"
    wide = PositionMask(allowed=partial(in_window, 4096))
    assert choose_form("auto", heads=8, size=4, length=1024, mask=wide) == "ulysses", "it hides nothing here"
