"""Pieces: ranges that cover a flat tensor without gaps, and which of them hold a parameter."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torsh_distributed.parallel.offload.storage.pieces import StatePiece, cut, overlaps


@given(st.integers(0, 50), st.integers(0, 200), st.integers(1, 40))
def test_a_cut_covers_the_range_in_order(start: int, numel: int, max_numel: int) -> None:
    ranges = cut(start, start + numel, max_numel)
    assert [index for low, high in ranges for index in range(low, high)] == list(range(start, start + numel))
    assert all(0 < high - low <= max_numel for low, high in ranges)


@given(st.integers(1, 40), st.integers(0, 100), st.integers(0, 100))
def test_overlaps_are_the_elements_of_the_range_by_piece(max_numel: int, start: int, numel: int) -> None:
    pieces = [StatePiece(low, high) for low, high in cut(0, 200, max_numel)]
    found = overlaps(pieces, start, start + numel)
    assert [index for _, low, high in found for index in range(low, high)] == list(range(start, start + numel))
    assert all(piece.start <= low < high <= piece.stop for piece, low, high in found)
