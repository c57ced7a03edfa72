"""Which data may promise every sample once, and that they keep it after an interruption."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from tests.bed.world import World
from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import ConfigurationError, InvalidArgument
from torsh_distributed.train.batches import DataOrder, RankBatch, sharded
from torsh_distributed.train.ledger.data_position import (
    END_OF_DATA,
    SeededSamples,
    begin_epoch,
    describe_data,
    describe_loader,
    length_of,
    positioned,
    require_same_data,
    require_same_order,
    with_positions,
)


class Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


class Counting(IterableDataset[Tensor]):
    """A stream of 10 numbers that knows where it is, and goes another way in every epoch."""

    def __init__(self) -> None:
        self.place = 0
        self.epoch = 0
        self.num_read = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]

    def __iter__(self) -> Iterator[Tensor]:
        while self.place < 10:
            self.place += 1
            self.num_read += 1
            yield torch.tensor(100 * self.epoch + self.place - 1)
        self.place = 0


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(10))


class UnrepeatableBatches(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(10).view(5, 2).tolist())

    def __len__(self) -> int:
        return 5


class Unrepeatable(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(10).tolist())

    def __len__(self) -> int:
        return 10


def read(loader: Any, **order: Any) -> list[RankBatch]:
    return list(sharded(loader, DataOrder(seed=3, is_exactly_once=True, **order), part=0, num_parts=1))


def numbers(batches: list[RankBatch]) -> list[int]:
    return [int(value) for piece in batches for value in piece.batch]


def test_a_stream_resumes_by_its_position_without_reading_what_is_done() -> None:
    whole = read(DataLoader(Counting(), batch_size=4), epoch=2)
    assert numbers(whole) == list(range(200, 210))
    data = Counting()
    rest = read(DataLoader(data, batch_size=4), epoch=2, skip=1, position=whole[0].position)
    assert numbers(rest) == list(range(204, 210))
    assert data.num_read == 6


@pytest.mark.parametrize("batch_size", [3, 5])
def test_an_epoch_that_was_read_to_its_end_is_not_read_again(batch_size: int) -> None:
    """The stream begins again when its end is noticed, with the last batch or after it."""
    whole = read(DataLoader(Counting(), batch_size=batch_size))
    data = Counting()
    assert read(DataLoader(data, batch_size=batch_size), skip=len(whole), position=whole[-1].position) == []
    assert numbers(read(DataLoader(data, batch_size=batch_size), epoch=1)) == list(range(100, 110))


def test_a_loader_that_knows_its_place_is_asked_itself() -> None:
    class Loader(Counting):
        pass

    loader = Loader()
    assert positioned(loader) is loader
    assert positioned(DataLoader(loader)) is loader
    assert positioned(DataLoader(loader, num_workers=1)) is None
    assert positioned(DataLoader(Endless())) is None


def test_lists_and_shuffled_data_are_accepted() -> None:
    assert numbers(read(list(torch.arange(6).split(4)))) == list(range(6))
    loader = DataLoader(Numbers(), batch_size=4, shuffle=True)
    whole = read(loader, epoch=1)
    assert sorted(numbers(whole)) == list(range(10))
    assert numbers(read(loader, epoch=1, skip=2)) == numbers(whole)[8:]
    assert [piece.ids for piece in whole] == [piece.batch.tolist() for piece in whole]


STREAM_HINT = "give it state_dict() and load_state_dict(), or set training.exactly_once = false"
WORKERS_HINT = "read it with num_workers=0: copies in workers cannot say where they are"
ORDER_HINT = "shuffle with DataLoader(shuffle=True), or make its order a function of set_epoch() alone"


@pytest.mark.parametrize(
    ("make", "message", "hint"),
    [
        (lambda: DataLoader(Endless()), "DataLoader over Endless cannot say where it is", STREAM_HINT),
        (
            lambda: DataLoader(Counting(), num_workers=1),
            "DataLoader over Counting cannot say where it is",
            WORKERS_HINT,
        ),
        (lambda: iter([torch.ones(1)]), "list_iterator cannot say where it is", STREAM_HINT),
        (
            lambda: DataLoader(Numbers(), sampler=Unrepeatable()),
            "Unrepeatable gives another order each time",
            ORDER_HINT,
        ),
        (
            lambda: DataLoader(Numbers(), batch_sampler=UnrepeatableBatches()),
            "UnrepeatableBatches gives another order each time",
            ORDER_HINT,
        ),
        (
            lambda: DataLoader(Numbers(), sampler=RandomSampler(Numbers(), replacement=True, num_samples=40)),
            "RandomSampler gives a sample more than once",
            ORDER_HINT,
        ),
        (
            lambda: DataLoader(Numbers(), sampler=WeightedRandomSampler([1.0] * 10, 40)),
            "WeightedRandomSampler gives another order each time",
            ORDER_HINT,
        ),
    ],
)
def test_what_could_lose_or_repeat_samples_is_refused_by_name(make: Any, message: str, hint: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as caught:
        read(make(), epoch=2)
    assert caught.value.hint == hint
    name = message.partition(" cannot")[0].partition(" gives")[0]
    is_stream = "cannot say" in message
    assert caught.value.context == ({"loader": name} if is_stream else {"sampler": name, "epoch": 2})


def test_a_position_is_not_changed_by_a_stream_that_goes_on() -> None:
    class Nested:
        def __init__(self) -> None:
            self.done: list[int] = []

        def state_dict(self) -> dict[str, list[int]]:
            return {"done": self.done}

        def load_state_dict(self, state: dict[str, list[int]]) -> None:
            self.done = state["done"]

        def __iter__(self) -> Iterator[int]:
            for number in range(3):
                self.done.append(number)
                yield number

    stream = Nested()
    assert list(with_positions(stream, stream)) == [(0, {"done": [0]}), (1, {"done": [0, 1]}), (2, END_OF_DATA)]


def test_a_loader_of_the_users_is_told_the_epoch_and_so_are_its_parts() -> None:
    told: list[tuple[str, int]] = []

    class Told:
        def set_epoch(self, epoch: int) -> None:
            told.append((type(self).__name__, epoch))

    class Data(Told, Numbers):
        pass

    class Loader(Told, DataLoader[Tensor]):
        pass

    begin_epoch(Loader(Data(), batch_size=2), 7)
    assert told == [("Loader", 7), ("Data", 7)]


class Noisy(Dataset[Tensor]):
    name = "of the user"

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, torch.rand(()).item(), random.random(), np.random.rand()], dtype=torch.float64)


def test_a_sample_depends_on_seed_epoch_and_itself() -> None:
    data = SeededSamples(Noisy(), seed=1, epoch=2)
    first = data[5]
    data[3]
    assert torch.equal(data[5], first)
    assert not torch.equal(SeededSamples(Noisy(), seed=1, epoch=3)[5], first)
    assert data.name == "of the user"


class Seeds(Dataset[tuple[int, int]]):
    """The seeds of torch's and NumPy's generators while a sample is made."""

    def __getitem__(self, index: int) -> tuple[int, int]:
        return torch.initial_seed(), int(np.random.get_state()[1][0])


def test_the_seeds_of_a_sample_are_those_of_every_version() -> None:
    """A run that goes on under a later version makes the same samples."""
    seed = 16_777_216
    whole = (seed * 1_000_003 + 3) * 1_000_003 + 5
    assert whole > 2**63 > whole % 2**63 > 2**32, "both have something to cut off"
    assert SeededSamples(Seeds(), seed=seed, epoch=3)[5] == (whole % 2**63, whole % 2**32)


class Marked(Numbers):
    fingerprint: Any = "of its files"


class MarkedByNumber(Numbers):
    _fingerprint = 17


class MarkedByAMethod(Numbers):
    def fingerprint(self) -> str:
        return "nobody calls it"


NOT_MARKED = {"fingerprint": None}
BY_INDEX = {"samples": 10, "order": "SequentialSampler"}
OF_FOUR = {"loader": "DataLoader", "batch size": 4, "drop_last": False}


@pytest.mark.parametrize(
    ("loader", "data", "form"),
    [
        (DataLoader(Numbers(), batch_size=4), {**NOT_MARKED, **BY_INDEX}, OF_FOUR),
        (DataLoader(Marked(), batch_size=4), {"fingerprint": "of its files", **BY_INDEX}, OF_FOUR),
        (DataLoader(MarkedByNumber(), batch_size=4), {"fingerprint": "17", **BY_INDEX}, OF_FOUR),
        (DataLoader(MarkedByAMethod(), batch_size=4), {**NOT_MARKED, **BY_INDEX}, OF_FOUR),
        (
            DataLoader(Numbers(), batch_size=4, shuffle=True),
            {**NOT_MARKED, "samples": 10, "order": "RandomSampler, training.seed 7"},
            OF_FOUR,
        ),
        (
            DataLoader(Numbers(), batch_sampler=BatchSampler(RandomSampler(Numbers()), 5, drop_last=True)),
            {**NOT_MARKED, "samples": 10, "order": "BatchSampler"},
            {"loader": "DataLoader", "batch size": None, "drop_last": False},
        ),
        (DataLoader(Counting(), batch_size=4), NOT_MARKED, OF_FOUR),
        (Counting(), {**NOT_MARKED, "batch size": None}, {"loader": "Counting"}),
        ([1, 2, 3], NOT_MARKED, {"loader": "list", "batches": 3}),
        (iter([1]), NOT_MARKED, {"loader": "list_iterator"}),
    ],
)
def test_data_and_loader_are_described_by_what_tells_them_from_others(loader: Any, data: Any, form: Any) -> None:
    assert describe_data(loader, seed=7) == data
    assert describe_loader(loader, seed=7) == {**data, **form}


def test_a_process_alone_has_nobody_to_compare_with() -> None:
    require_same_data({"samples": 1})
    require_same_order([[0]], DataLoader(Numbers()), epoch=0)
    assert length_of(iter([])) is None


def test_seeds_are_not_passed_over_by_what_else_the_dataset_can_do() -> None:
    """torch reads whole batches from a dataset that has `__getitems__`; copies ask for `__setstate__`."""

    class Whole(Noisy):
        def __getitems__(self, indices: list[int]) -> list[Tensor]:
            raise AssertionError("it would not be seeded")

    data = SeededSamples(Whole(), seed=1, epoch=2)
    (rows,) = DataLoader(copy.deepcopy(data), batch_size=8, sampler=range(8))
    assert torch.equal(rows, torch.stack([data[index] for index in range(8)]))


@pytest.mark.ranks
def test_workers_resume_with_the_same_transforms() -> None:
    def read(skip: int, num_parts: int) -> list[list[float]]:
        loader = DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=1)
        order = DataOrder(seed=5, skip=skip, is_deterministic=True)
        parts = [list(sharded(loader, order, part=part, num_parts=num_parts)) for part in range(num_parts)]
        return [row for pieces in zip(*parts, strict=True) for piece in pieces for row in piece.batch.tolist()]

    whole = read(0, 1)
    assert read(1, 1) == whole[4:]
    assert read(1, 2) == whole[4:]


def read_here(kind: str) -> tuple[str, str]:
    """What an epoch of this loader comes to: an error, and what was said."""
    rank, said = process_group.rank(), []
    data = list(range(8))
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torsh_distributed")
    logger.addHandler(handler)
    loaders: dict[str, Any] = {
        "divided": lambda: DataLoader(
            data, batch_size=2, sampler=DistributedSampler(data, num_replicas=2, rank=rank, shuffle=False)
        ),
        "drawn apart": lambda: DataLoader(
            data,
            batch_size=2,
            sampler=WeightedRandomSampler([1.0] * 8, 8, generator=torch.Generator().manual_seed(rank)),
        ),
        "drawn alike": lambda: DataLoader(
            data, batch_size=2, sampler=WeightedRandomSampler([1.0] * 8, 8, generator=torch.Generator().manual_seed(1))
        ),
        "stream of its own": lambda: [torch.arange(4) + rank],
        "same stream": lambda: [torch.arange(4)],
        "longer stream": lambda: iter([torch.arange(4)] * (2 + rank)),
        "one transformed": lambda: [(torch.arange(4.0) + rank, torch.arange(4))],
    }
    try:
        list(sharded(loaders[kind](), DataOrder(seed=0), part=rank, num_parts=2))
    except (ConfigurationError, InvalidArgument) as error:
        return str(error), ""
    finally:
        logger.removeHandler(handler)
    return "", "\n".join(said)


KINDS = (
    "divided",
    "drawn apart",
    "drawn alike",
    "stream of its own",
    "same stream",
    "longer stream",
    "one transformed",
)


class Unseeded(Dataset[Tensor]):
    """Draws from a generator that each rank seeds otherwise."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(3)


def read_all() -> dict[str, tuple[str, str]]:
    found = {kind: read_here(kind) for kind in KINDS}
    torch.manual_seed(process_group.rank())
    with pytest.raises(InvalidArgument) as refused:
        list(sharded(DataLoader(Unseeded(), batch_size=2), DataOrder(seed=0), part=0, num_parts=1))
    return {**found, "noise": (str(refused.value), "")}


@pytest.mark.ranks
def test_ranks_that_read_other_batches_are_told(world: World) -> None:
    found, others = world.run(read_all)
    assert "leave DistributedSampler out" in found["divided"][0]
    assert "a generator that all ranks seed alike" in found["drawn apart"][0]
    differs = "the first batch of epoch 0 differs between rank 0 and rank 1"
    assert differs in found["stream of its own"][0]
    assert differs in others["stream of its own"][0]
    assert differs in found["one transformed"][1]
    assert others["one transformed"] == ("", "")
    assert "epoch 0 has 2 batches on rank 0, and more on rank 1" in found["longer stream"][0]
    assert "which compute one model together" in found["noise"][0]
    for kind in ("drawn alike", "same stream"):
        assert found[kind] == ("", "")
