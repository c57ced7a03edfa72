"""Scatter-reduce-all-gather on real ranks: one mean for all, close to the plain one, and an error for all."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.bed.world import World
from torsh_distributed.compress.codecs import make_codec
from torsh_distributed.compress.codecs.base import Key
from torsh_distributed.compress.codecs.dense.base import DenseCodec
from torsh_distributed.compress.codecs.dense.rounding import Int8Codec
from torsh_distributed.compress.codecs.dense.sign import SignCodec
from torsh_distributed.compress.exchange import dense_exchange
from torsh_distributed.compress.exchange.dense_exchange import all_gather_encoded, reduce_scatter_mean, shard_bounds
from torsh_distributed.compress.messages.compressed_gradient import HEADER_BYTES
from torsh_distributed.errors import CompressionError, TensorShapeMismatch

# The norm of the error relative to that of the plain mean, for gradients of a normal distribution, both legs together.
LARGEST_ERROR = {
    "none": 1e-6,
    "fp16": 1e-3,
    "bf16": 1e-2,
    "int8": 0.02,
    "int8:64": 0.015,
    "nbit:8": 0.03,
    "nbit:4": 0.35,
    "nbit:3": 0.8,
    "bimodal:16": 0.25,
    "natural": 0.5,
    "sign": 0.9,
    "majority": 1.5,  # the magnitudes of independent gradients do not cancel out, only their signs do
    "ternary": 1.0,
}
SIZES = [0, 5, 4097]


def gradient(rank: int, num_elements: int) -> Tensor:
    return torch.randn(num_elements, generator=torch.Generator().manual_seed(17 + rank))


def the_group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def dense(method: str) -> DenseCodec:
    codec = make_codec(method)
    assert isinstance(codec, DenseCodec)
    return codec


def average_all(methods: list[str], sizes: list[int]) -> dict[tuple[str, int], tuple[str, float, int]]:
    """Runs on every rank: the bits of each mean, its distance from the plain mean, the bytes sent."""
    group = the_group()
    found = {}
    for method in methods:
        codec = make_codec(method)
        for size in sizes:
            x = gradient(group.rank(), size)
            plain = torch.stack([gradient(rank, size) for rank in range(group.size())]).mean(0)
            averaged = codec.average(x.clone(), group, Key(seed=3, step=1))
            assert averaged.mean.shape == averaged.sent.shape == x.shape
            error = float((averaged.mean - plain).norm() / plain.norm()) if size else 0.0
            digest = hashlib.sha256(averaged.mean.numpy().tobytes()).hexdigest()
            found[method, size] = digest, error, averaged.num_bytes
    return found


@pytest.mark.parametrize(("num_ranks", "backend"), [(2, "gloo"), (3, "shm"), (4, "gloo")])
def test_every_rank_gets_the_same_bits_near_the_plain_mean(world: World, num_ranks: int, backend: str) -> None:
    found = world.run(average_all, list(LARGEST_ERROR), SIZES, num_ranks=num_ranks, backend=backend)
    for (method, size), (digest, error, _) in found[0].items():
        assert all(other[method, size][0] == digest for other in found), (method, size)
        if size > 1000:
            assert error <= LARGEST_ERROR[method], (method, size)
            assert method == "none" or error > 0, (method, size)  # it was compressed


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_volume_is_twice_the_encoded_tensor_however_many_ranks(world: World, num_ranks: int) -> None:
    methods, num_elements = ["int8", "nbit:4", "sign", "ternary", "natural", "bimodal:4"], 60 * 1280 * 4
    for found in world.run(average_all, methods, [num_elements], num_ranks=num_ranks, backend="shm"):
        for method in methods:
            num_bytes = found[method, num_elements][2]
            expected = 2 * dense(method).payload_bytes(num_elements) * (num_ranks - 1) / num_ranks
            overhead = 2 * num_ranks * (HEADER_BYTES + 16 + 1024)  # headers, and shards of whole blocks
            assert expected - 16 <= num_bytes <= expected + overhead, method


def average_by_hand(codec: DenseCodec, gradients: list[Tensor], key: Key) -> Tensor:
    """What the ranks should get, in one process: each shard decoded, averaged, and encoded again by its owner."""
    num_ranks, size = len(gradients), gradients[0].numel()
    shards = []
    for start, end in zip(*(shard_bounds(size, num_ranks, codec.block)[cut:] for cut in (0, 1)), strict=False):
        payloads = [codec.encode(x[start:end], key) for x in gradients]
        mean = torch.stack([codec.decode(payload, end - start, key) for payload in payloads]).mean(0)
        shards.append(codec.decode(codec.encode(mean, key), end - start, key))
    return torch.cat(shards)


def average_once(method: str, num_elements: int) -> Tensor:
    group = the_group()
    return make_codec(method).average(gradient(group.rank(), num_elements), group, Key()).mean


@pytest.mark.parametrize("method", ["int8", "sign", "ternary"])
def test_the_mean_is_what_one_process_computes_from_the_messages(world: World, method: str) -> None:
    gradients = [gradient(rank, 5000) for rank in range(2)]
    expected = average_by_hand(dense(method), gradients, Key())
    for mean in world.run(average_once, method, 5000, num_ranks=2, backend="shm"):
        torch.testing.assert_close(mean, expected, rtol=1e-5, atol=0)


def check_halves() -> None:
    group = the_group()
    me, num_ranks = group.rank(), group.size()
    for method in ("int8", "nbit:8", "fp16", "natural"):
        codec, size = dense(method), 1000 * num_ranks
        x = gradient(me, size)
        plain = torch.stack([gradient(rank, size) for rank in range(num_ranks)]).mean(0)
        shard = reduce_scatter_mean(codec, x, group, Key())
        own = plain[1000 * me : 1000 * (me + 1)]
        assert (shard - own).norm() <= LARGEST_ERROR[method] * own.norm()
        whole = all_gather_encoded(codec, own, group, Key())
        assert (whole - plain).norm() <= LARGEST_ERROR[method] * plain.norm()
    with pytest.raises(TensorShapeMismatch, match="evenly"):
        reduce_scatter_mean(dense("int8"), torch.zeros(num_ranks + 1), group, Key())


def test_the_halves_work_alone(world: World) -> None:
    world.run(check_halves, num_ranks=3, backend="gloo")


def vote(scales: list[float]) -> Tensor:
    """Each rank says +scale for the first half and the sign of its rank's parity for the second."""
    group = the_group()
    scale = scales[group.rank()]
    x = torch.full((2048,), scale)
    x[1024:] *= 1 if group.rank() == 0 else -1
    return make_codec("majority").average(x, group, Key()).mean


def test_a_majority_outvotes_a_rank_with_large_gradients(world: World) -> None:
    for mean in world.run(vote, [100.0, 1.0, 1.0], num_ranks=3, backend="shm"):
        torch.testing.assert_close(mean[:1024], torch.full((1024,), 34.0))
        torch.testing.assert_close(mean[1024:], torch.full((1024,), -34.0))


def keep_accounts() -> None:
    """With server feedback nothing is lost over the steps: means and residual add up to what was sent."""
    group = the_group()
    codec = SignCodec(server_feedback=True)
    size, received, sent = 3000, torch.zeros(3000), torch.zeros(3000)
    start, end = shard_bounds(size, group.size(), codec.block)[group.rank() :][:2]
    for step in range(5):
        averaged = codec.average(gradient(10 * step + group.rank(), size), group, Key(step=step))
        received += averaged.mean
        everyone = averaged.sent.clone()
        dist.all_reduce(everyone)
        sent += everyone / group.size()
    residual = codec.state_dict()["residuals"][0]
    torch.testing.assert_close(received[start:end] + residual, sent[start:end], rtol=1e-4, atol=1e-5)
    assert float(residual.norm()) > 0
    resumed = SignCodec(server_feedback=True)
    resumed.load_state_dict(codec.state_dict())
    x = gradient(99 + group.rank(), size)
    assert torch.equal(resumed.average(x, group, Key()).mean, codec.average(x, group, Key()).mean)
    fresh = SignCodec(server_feedback=True)
    x = gradient(99 + group.rank(), 2000)
    assert torch.equal(codec.average(x, group, Key()).mean, fresh.average(x, group, Key()).mean)


def test_server_feedback_loses_nothing_resumes_and_begins_anew_with_a_new_size(world: World) -> None:
    world.run(keep_accounts, num_ranks=2, backend="shm")


def differ(what: str) -> None:
    group = the_group()
    me = group.rank()
    methods = {"codec": ["int8", "natural"], "cast": ["fp16", "bf16"], "parameter": ["int8", "int8:128"]}
    x = torch.ones(2000 if what != "size" or me else 2001)
    if what == "nan" and me:
        x[7] = torch.nan
    if what == "damage" and me:
        dense_exchange.seal = damaging  # type: ignore[assignment]  # the wire flips a bit after the checksum was taken
    with pytest.raises(CompressionError) as caught:
        make_codec(methods.get(what, ["int8"] * 2)[me]).average(x, group, Key())
    expected = {"nan": "from_rank=1|of rank 1", "damage": "from_rank=1|of rank 1"}.get(what, "ranks differ")
    caught.match(expected)


def damaging(message: Tensor, *args: Any, **options: Any) -> None:
    original(message, *args, **options)
    message[HEADER_BYTES + 100] ^= 4


original = dense_exchange.seal


@pytest.mark.parametrize("what", ["codec", "cast", "parameter", "size", "nan", "damage"])
def test_ranks_that_differ_and_messages_that_are_damaged_raise_on_every_rank(world: World, what: str) -> None:
    world.run(differ, what, num_ranks=2, backend="shm" if what == "size" else "gloo")


@given(st.integers(0, 10_000), st.integers(1, 9), st.integers(1, 700))
def test_shards_cover_the_tensor_in_whole_blocks_as_evenly_as_those_allow(
    size: int, num_ranks: int, block: int
) -> None:
    bounds = shard_bounds(size, num_ranks, block)
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    assert (bounds[0], bounds[-1], len(lengths)) == (0, size, num_ranks)
    assert all(start % block == 0 or start == size for start in bounds)
    assert lengths[0] == max(lengths)
    assert max(lengths) - min(lengths) < 2 * block


def test_one_rank_alone_gets_its_own_message_back(world: World) -> None:
    (mean,) = world.run(average_once, "int8", 1000, num_ranks=1)
    codec = Int8Codec()
    assert torch.equal(mean, codec.decode(codec.encode(gradient(0, 1000), Key()), 1000, Key()))
