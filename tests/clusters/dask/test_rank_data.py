from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torsh_distributed.clusters.dask.rank_data import RankRows, RowSlice, cut_rows, rows_loader
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.train.batches import DataOrder, sharded


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(1, 7))
def test_every_row_is_in_one_block_and_blocks_are_equal(lengths: list[int], num_blocks: int) -> None:
    blocks = cut_rows(lengths, num_blocks)
    rows = [(one.partition, row) for block in blocks for one in block for row in range(one.start, one.stop)]
    assert rows == [(number, row) for number, length in enumerate(lengths) for row in range(length)]
    sizes = [sum(one.stop - one.start for one in block) for block in blocks]
    assert max(sizes) - min(sizes) <= 1


def test_a_partition_inside_a_block_is_not_cut() -> None:
    assert cut_rows([4, 4], 2) == [[RowSlice(0, 0, 4)], [RowSlice(1, 0, 4)]]


def rows_of_ranks(values: np.ndarray, num_ranks: int, lengths: list[int]) -> list[RankRows]:
    edges = np.cumsum([0, *lengths])
    partitions = [values[start:stop] for start, stop in itertools.pairwise(edges)]
    return [
        RankRows([partitions[one.partition][one.start : one.stop] for one in block], part, num_ranks, len(values))
        for part, block in enumerate(cut_rows(lengths, num_ranks))
    ]


@given(st.integers(1, 4), st.lists(st.integers(4, 9), min_size=1, max_size=5), st.integers(1, 4), st.integers(0, 3))
def test_ranks_read_their_own_rows_and_together_each_row_once(
    num_ranks: int, lengths: list[int], share: int, epoch: int
) -> None:
    values = np.arange(sum(lengths), dtype=np.float32)[:, None]
    seen: list[float] = []
    for part, rows in enumerate(rows_of_ranks(values, num_ranks, lengths)):
        loader = rows_loader(rows, batch_size=share * num_ranks)
        order = DataOrder(seed=0, epoch=epoch, is_exactly_once=True, compares_ranks=False)
        for piece in sharded(loader, order, part=part, num_parts=num_ranks):
            if piece.num_samples:  # else one row of another rank, which only Dask data of one rank could give
                seen += piece.batch[:, 0].tolist()
    assert sorted(seen) == values[:, 0].tolist()


def test_several_collections_come_in_a_tuple_and_in_step() -> None:
    values = np.arange(24, dtype=np.float32).reshape(12, 2)
    x, y = rows_of_ranks(values, 1, [5, 7])[0], rows_of_ranks(values * 10, 1, [6, 6])[0]
    for first, second in rows_loader(x, y, batch_size=4):
        assert first.shape == (4, 2)
        torch.testing.assert_close(first * 10, second)


def test_a_dataframe_comes_as_columns() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": np.arange(6.0), "b": np.arange(6)})
    batch = next(iter(rows_loader(RankRows([frame[:2], frame[2:]], 0, 1, 6), batch_size=6, shuffle=False)))
    assert batch["a"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert batch["b"].dtype == torch.int64


def test_what_cannot_be_divided_is_refused() -> None:
    values = np.zeros((8, 1), dtype=np.float32)
    one, two = rows_of_ranks(values, 2, [8])
    with pytest.raises(InvalidArgument, match="a batch of 3 rows does not split evenly over 2 ranks"):
        rows_loader(one, batch_size=3)
    with pytest.raises(InvalidArgument, match="row 0 is not on this rank, which has rows 4 to 7"):
        two.take([0])
    with pytest.raises(InvalidArgument, match="different numbers of rows"):
        rows_loader(one, RankRows([values[:2]], 0, 2, 4), batch_size=2)
