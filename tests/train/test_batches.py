"""Shares of batches: every sample once, the same batches at every world size."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.train.batches import (
    DataOrder,
    count_pieces,
    count_samples,
    has_rows,
    pick_rows,
    rows_of,
    sharded,
    split_rows,
    take_rows,
)

Pair = namedtuple("Pair", "inputs targets")


@given(num_samples=st.integers(0, 200), num_parts=st.integers(1, 17))
def test_shares_cover_every_sample_once_and_differ_by_at_most_one(num_samples: int, num_parts: int) -> None:
    shares = [rows_of(num_samples, part=part, num_parts=num_parts) for part in range(num_parts)]
    covered = [row for share in shares for row in range(share.start, share.stop)]
    assert covered == list(range(num_samples))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


class Numbers(Dataset[torch.Tensor]):
    """Sample i is the number i; remembers which were fetched."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        self.fetched.append(index)
        return torch.tensor(index)


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, size: int = 23) -> None:
        self.size = size

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.tensor(i) for i in range(self.size)])


def epoch_of(
    loader: object, num_parts: int, epoch: int = 0, skip: int = 0, num_done: int | None = None
) -> list[list[int]]:
    """The global batches, put together again from all parts."""
    order = DataOrder(seed=5, epoch=epoch, skip=skip, num_done=num_done)
    parts = [
        list(sharded(loader, order, part=part, num_parts=num_parts))  # type: ignore[arg-type]
        for part in range(num_parts)
    ]
    whole = []
    for pieces in zip(*parts, strict=True):
        rows = [int(value) for piece in pieces if piece.num_samples for value in piece.batch]
        assert {piece.total for piece in pieces} == {len(rows)}
        assert all(len(piece.batch) == max(piece.num_samples, 1) for piece in pieces)
        whole.append(rows)
    return whole


@given(
    size=st.integers(1, 40),
    batch_size=st.integers(1, 9),
    num_parts=st.integers(1, 5),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_batches_are_the_same_at_every_world_size(
    size: int, batch_size: int, num_parts: int, shuffle: bool, drop_last: bool
) -> None:
    loader = DataLoader(Numbers(size), batch_size=batch_size, shuffle=shuffle, drop_last=drop_last)
    whole = epoch_of(loader, num_parts)
    assert whole == epoch_of(loader, 1)
    if not drop_last:
        assert sorted(row for batch in whole for row in batch) == list(range(size))


def test_a_rank_fetches_its_own_samples_alone() -> None:
    data = Numbers(12)
    loader = DataLoader(data, batch_size=6)
    list(sharded(loader, DataOrder(seed=0), part=1, num_parts=3))
    assert data.fetched == [2, 3, 8, 9]


def test_epochs_are_shuffled_differently_and_repeatably() -> None:
    loader = DataLoader(Numbers(30), batch_size=10, shuffle=True)
    assert epoch_of(loader, 2, epoch=0) == epoch_of(loader, 2, epoch=0)
    assert epoch_of(loader, 2, epoch=0) != epoch_of(loader, 2, epoch=1)


def test_skipping_goes_on_where_it_stopped() -> None:
    loader = DataLoader(Numbers(30), batch_size=4, shuffle=True)
    assert epoch_of(loader, 2, skip=3) == epoch_of(loader, 1)[3:]


@pytest.mark.parametrize("loader", [DataLoader(Stream(), batch_size=5), list(torch.arange(23).split(5))])
def test_streams_and_plain_lists_are_cut_batch_by_batch(loader: object) -> None:
    assert epoch_of(loader, 4) == [list(range(start, min(start + 5, 23))) for start in range(0, 23, 5)]
    assert epoch_of(loader, 2, skip=4) == [[20, 21, 22]]


@given(
    size=st.integers(1, 40),
    batch_size=st.integers(1, 9),
    other_size=st.integers(1, 9),
    done=st.integers(0, 5),
    kind=st.sampled_from(["shuffled", "in order", "list", "stream"]),
)
def test_the_rest_of_an_epoch_can_be_read_in_batches_of_another_size(
    size: int, batch_size: int, other_size: int, done: int, kind: str
) -> None:
    def loader(batch_size: int) -> object:
        if kind == "list":
            return list(torch.arange(size).split(batch_size))
        data = Stream(size) if kind == "stream" else Numbers(size)
        return DataLoader(data, batch_size=batch_size, shuffle=kind == "shuffled")

    whole = epoch_of(loader(batch_size), 1)
    before = [row for batch in whole[:done] for row in batch]
    order = [row for batch in whole for row in batch]
    same = epoch_of(loader(batch_size), 2, skip=done, num_done=len(before))
    assert same == whole[done:], "the same size gives the same batches"
    other = epoch_of(loader(other_size), 2, skip=done, num_done=len(before))
    assert before + [row for batch in other for row in batch] == order
    assert max(map(len, other), default=0) <= other_size


def test_what_a_last_batch_of_another_size_would_drop_is_read() -> None:
    """Of 20 samples a loader with drop_last read 16 in batches of 8; the rest is a batch of 4."""
    loader = DataLoader(Numbers(20), batch_size=4, drop_last=True)
    assert epoch_of(loader, 1, skip=2, num_done=16) == [[16, 17, 18, 19]]


class Pairs:
    """A batch sampler of its own: even samples, then odd ones."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[list[int]]:
        for first in (0, 1):
            yield from (part.tolist() for part in torch.arange(first, 20, 2).split(self.batch_size))


def test_batches_that_a_sampler_of_batches_makes_keep_their_size() -> None:
    def loader(batch_size: int) -> DataLoader[torch.Tensor]:
        return DataLoader(Numbers(20), batch_sampler=Pairs(batch_size))  # type: ignore[arg-type]

    assert epoch_of(loader(4), 1, skip=3, num_done=10) == epoch_of(loader(4), 1)[3:]
    with pytest.raises(InvalidArgument, match="after 3 batches of 10 samples, but Pairs now gives 6 in as many"):
        epoch_of(loader(2), 1, skip=3, num_done=10)


def test_a_stream_that_ends_before_what_is_done_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="interrupted after 30 samples, but the data end after 23"):
        epoch_of(DataLoader(Stream(), batch_size=5), 1, skip=6, num_done=30)


def test_rows_are_taken_from_every_tensor_of_a_nested_batch() -> None:
    rows = torch.arange(6)
    batch = {"a": rows, "b": (rows * 2, [rows * 3]), "pair": Pair(rows, rows), "name": "kept"}
    part = take_rows(batch, 2, 4)
    assert part["a"].tolist() == [2, 3]
    assert part["b"][1][0].tolist() == [6, 9]
    assert part["pair"].targets.tolist() == [2, 3]
    assert part["name"] == "kept"
    assert count_samples(batch) == 6


@given(num_samples=st.integers(1, 50), num_pieces=st.integers(1, 9))
def test_the_first_piece_can_be_the_largest(num_samples: int, num_pieces: int) -> None:
    pieces = split_rows(torch.arange(num_samples), num_samples, num_pieces, is_largest_first=True)
    assert torch.cat([piece for piece, _ in pieces]).tolist() == list(range(num_samples))
    assert len(pieces[0][0]) == max(len(piece) for piece, _ in pieces)
    assert sum(share for _, share in pieces) == pytest.approx(1)


@given(num_samples=st.integers(1, 50), num_pieces=st.integers(1, 9), multiple=st.integers(1, 9))
def test_pieces_are_multiples_and_a_rest(num_samples: int, num_pieces: int, multiple: int) -> None:
    pieces = split_rows(torch.arange(num_samples), num_samples, num_pieces, multiple=multiple)
    assert torch.cat([piece for piece, _ in pieces]).tolist() == list(range(num_samples))
    assert len(pieces) == count_pieces(num_samples, num_pieces, multiple=multiple)
    rest = [len(piece) for piece, _ in pieces if len(piece) % multiple]
    assert rest == ([num_samples % multiple] if num_samples % multiple else [])
    assert sum(share for _, share in pieces) == pytest.approx(1)


def test_ranks_with_fewer_samples_can_make_as_many_passes() -> None:
    pieces = split_rows(torch.arange(2), 2, 4, at_least=3)
    assert [(piece.tolist(), share) for piece, share in pieces] == [([0], 0.5), ([1], 0.5), ([0], 0.0)]
    assert [share for _, share in split_rows(torch.arange(1), 1, 4, at_least=2)] == [1.0, 0.0]
    assert [share for _, share in split_rows(torch.arange(4), 4, 2, at_least=2)] == [0.5, 0.5]


@pytest.mark.parametrize("batch", [3, "text", torch.tensor(1.0), [], {}])
def test_a_batch_without_samples_to_count_is_refused(batch: object) -> None:
    with pytest.raises(InvalidArgument, match="dim 0 counts samples"):
        count_samples(batch)


def test_samples_of_unequal_length_are_counted_and_cut_as_samples() -> None:
    batch = ([torch.ones(length, 2) for length in (3, 1, 4)], torch.arange(3))
    assert count_samples(batch) == 3
    assert has_rows(batch)
    (first, labels), _ = split_rows(batch, 3, 3)[1]
    assert [len(one) for one in first] == [1]
    assert labels.tolist() == [1]


def test_lists_with_an_entry_for_each_sample_are_cut_by_entries() -> None:
    images = [torch.ones(3, size, 2) for size in (4, 4, 5, 6)]
    boxes = [{"boxes": torch.ones(number, 4)} for number in (1, 3, 2, 5)]
    for batch in ((images, boxes), (tuple(images), torch.arange(4)), {"text": [*"abcd"], "x": torch.arange(4)}):
        assert count_samples(batch) == 4
        assert has_rows(batch)
    found, wanted = take_rows((images, boxes), 1, 3)
    assert ([one.shape[1] for one in found], len(wanted[0]["boxes"])) == ([4, 5], 3)
    assert pick_rows({"text": [*"abcd"], "x": torch.arange(4)}, [2, 0])["text"] == ["c", "a"]
    first, second = take_rows([torch.ones(2, 5), torch.zeros(2, 5)], 0, 1)  # two tensors of two samples
    assert (first.shape, second.shape) == ((1, 5), (1, 5))


def test_named_inputs_and_named_targets_are_columns_and_no_two_samples() -> None:
    batch = ({"words": torch.zeros(8, 3), "mask": torch.ones(8, 3)}, {"labels": torch.arange(8)})
    assert count_samples(batch) == 8
    assert take_rows(batch, 2, 4)[1]["labels"].tolist() == [2, 3]
    shared = (
        {"words": torch.zeros(8, 3), "mask": torch.ones(8, 3)},
        {"labels": torch.arange(8), "mask": torch.ones(8)},
    )
    assert count_samples(shared) == 8


def test_samples_may_lack_what_others_have() -> None:
    found = [{"boxes": torch.zeros(5, 4)}, {"boxes": torch.zeros(3, 4), "masks": torch.zeros(3, 8)}, {}]
    assert count_samples(found) == 3
    assert take_rows(found, 2, 3) == [{}]


def test_a_number_that_all_samples_share_stays() -> None:
    rows, scale = take_rows((torch.arange(4), torch.tensor(2.0)), 1, 3)
    assert (rows.tolist(), float(scale)) == ([1, 2], 2.0)


def test_tensors_that_are_not_by_sample_are_not_cut_silently() -> None:
    batch = {"x": torch.ones(8, 2), "class weights": torch.ones(5)}
    with pytest.raises(InvalidArgument, match=r"gradient_accumulation cuts a batch.*numbers of rows"):
        split_rows(batch, 8, 2)
    assert len(split_rows(batch, 8, 1)) == 1
    with pytest.raises(InvalidArgument, match="a loader without indices cuts a batch"):
        list(sharded([batch], DataOrder(seed=0), part=0, num_parts=2))
