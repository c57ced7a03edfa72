"""Damage that reaches one receiver alone is raised by every rank, at the same average, and the group stays usable."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.bed.world import World
from tests.compress.codecs.checks import gradient
from torsh_distributed.compress.codecs import make_codec
from torsh_distributed.compress.codecs.base import Key
from torsh_distributed.compress.codecs.dense.base import DenseCodec
from torsh_distributed.compress.exchange import dense_exchange, scatter, sparse_exchange
from torsh_distributed.compress.exchange.scatter import scattered_mean
from torsh_distributed.errors import CompressionError

NUM_ELEMENTS = 12_000  # a multiple of the ranks
Average = Callable[[str, dist.ProcessGroup], Tensor]


def whole(method: str, group: dist.ProcessGroup) -> Tensor:
    return make_codec(method).average(gradient(NUM_ELEMENTS, group.rank()), group, Key()).mean


def gathered(method: str, group: dist.ProcessGroup) -> Tensor:
    codec = make_codec(method)
    assert isinstance(codec, DenseCodec)
    return dense_exchange.all_gather_encoded(codec, gradient(2000, group.rank()), group, Key())


def scattered(method: str, group: dist.ProcessGroup) -> Tensor:
    return scattered_mean(make_codec(method), gradient(NUM_ELEMENTS, group.rank()), group, Key()).mean


def damage_what_rank_0_receives(module: ModuleType, name: str) -> Callable[[], None]:
    """Flip a bit of the payload that rank 1 sent, on rank 0 alone, in the last collective; returns how to undo it."""
    original = getattr(module, name)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()

    def receive(tensor: Tensor, *args: Any, **options: Any) -> Any:
        result = original(tensor, *args, **options)
        if rank == 0 and tensor.dtype == torch.uint8:
            if name == "all_gather":
                result[1][40] ^= 16
            else:
                received = result.wait() if options.get("async_op") else result
                received[-received.numel() * (num_ranks - 1) // num_ranks :][40] ^= 16  # all messages are of one size
        return result

    setattr(module, name, receive)
    return lambda: setattr(module, name, original)


CASES: list[tuple[str, Average, ModuleType, str]] = [
    ("int8", whole, dense_exchange, "all_gather"),
    ("int8", whole, dense_exchange, "all_to_all_single"),
    ("sign", gathered, dense_exchange, "all_gather"),
    ("int8", scattered, dense_exchange, "all_to_all_single"),
    ("topk:0.1", whole, sparse_exchange, "all_gather"),
    ("topk:0.1", scattered, scatter, "all_to_all_single"),
    ("randomk:0.1", scattered, scatter, "all_to_all_single"),
]


def average_with_damage() -> list[tuple[str, int, int]]:
    """Runs on every rank: the error of each case here, and that the same average succeeds right after it."""
    group = dist.group.WORLD
    assert group is not None
    found = []
    for method, average, module, collective in CASES:
        expected = average(method, group)
        undo = damage_what_rank_0_receives(module, collective)
        with pytest.raises(CompressionError) as caught:
            average(method, group)
        undo()
        context = caught.value.context
        found.append((caught.value.message, context["from_rank"], context["rank"]))
        assert torch.equal(average(method, group), expected)
    return found


@pytest.mark.parametrize(("num_ranks", "backend"), [(2, "gloo"), (4, "shm")])
def test_every_rank_raises_and_names_receiver_and_sender(world: World, num_ranks: int, backend: str) -> None:
    receiver, *others = world.run(average_with_damage, num_ranks=num_ranks, backend=backend)
    for message, sender, rank in receiver:
        assert "checksum" in message
        assert (sender, rank) == (1, 0)
    for errors in others:
        assert errors == [("rank 0 could not decode the message of rank 1", 1, 0)] * len(CASES)
