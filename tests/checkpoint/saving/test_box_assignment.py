"""Who writes what: every box once, by a rank that has it, and replicas share the work."""

from __future__ import annotations

import math

import pytest
import torch

from torsh_distributed.checkpoint.saving.box_assignment import MOST_BYTES, assign, claims_of, pieces_of
from torsh_distributed.errors import InternalError
from torsh_distributed.parallel.state.held_tensors import (
    DimRun,
    HeldBox,
    HeldTensor,
    WholeLayout,
    layout_of,
    whole_runs,
)


def held(name: str, layout: WholeLayout) -> HeldTensor:
    return HeldTensor(name, layout, torch.float32, lambda: torch.empty(layout.local_shape))


def test_replicas_share_the_bytes() -> None:
    tensors = [held(f"t{number}", layout_of((100,), whole_runs((100,)), (100,))) for number in range(8)]
    chosen = assign([claims_of(tensors)] * 4)
    assert [len(keys) for keys in chosen] == [2, 2, 2, 2]
    assert len(set().union(*chosen)) == 8


def test_a_large_box_is_cut_into_pieces_that_make_it_up() -> None:
    for sizes in ((3, 5_000_000), (40_000_000,), (1, 1, 20_000_000), (7, 3, 2_000_000)):
        box = HeldBox(tuple(0 for _ in sizes), tuple(5 for _ in sizes), sizes)
        pieces = pieces_of(box, 4)
        assert sum(piece.numel for piece in pieces) == math.prod(sizes)
        assert all(piece.numel * 4 <= MOST_BYTES for piece in pieces)
        assert len({piece.whole for piece in pieces}) == len(pieces)
        assert all(
            local - whole == 5 for piece in pieces for local, whole in zip(piece.local, piece.whole, strict=True)
        )


def test_a_hole_is_our_bug_and_is_not_written() -> None:
    part = layout_of((10,), [[DimRun(0, 0, 4)]], (4,))
    with pytest.raises(InternalError, match="hold 16 bytes of w, which has 40"):
        assign([claims_of([held("w", part)])])
