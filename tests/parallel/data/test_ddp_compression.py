"""Gradients compressed on their way: models learn, ranks stay equal, and what breaks is told to all."""

from __future__ import annotations

import math
import os

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from tests.bed.world import World
from tests.parallel.example_models import SMALL, backward, build, in_turn, share
from torsh_distributed.compress.codecs.base import Averaged, Key
from torsh_distributed.compress.codecs.linear.cast import Fp16Codec
from torsh_distributed.compress.compressor import GradientCompressor
from torsh_distributed.errors import CommunicationError, CompressionError, InvalidArgument
from torsh_distributed.parallel.data.ddp import DistributedDataParallel
from torsh_distributed.plan import CompressConfig, DdpConfig

METHODS = ["fp16", "int8", "nbit:4", "sign", "natural", "topk:0.05", "powersgd:2", "randomk:0.2"]


def learn(methods: list[str], feedback: str) -> list[tuple[float, float, float]]:
    """First and last loss of this rank, and the ratio of bytes; replicas stay equal, bit by bit."""
    found = []
    for method in methods:
        config = CompressConfig(method=method, error_feedback=feedback, warmup_steps=2, skip_below_numel=100)  # type: ignore[arg-type]
        model = DistributedDataParallel(build(), SMALL, compression=config)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        [(x, y)] = share()
        losses = []
        for step in range(30):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            backward(loss)
            if step < 5 or step % 10 == 9:  # as it begins, with the end of the warm-up, and later
                assert model.check_gradient_consistency() == [], method
            optimizer.step()
            losses.append(loss.item())
        stats = model.sync_stats()
        assert stats.compression is not None
        assert stats.num_buckets > 1
        ratio = stats.compression["ratio"]
        assert ratio is not None
        found.append((losses[0], losses[-1], ratio))
        assert model.compressor is not None
        assert model.compressor.num_steps == 30
    return found


@pytest.mark.parametrize("feedback", ["ef14", pytest.param("ef21", marks=pytest.mark.matrix)])
def test_models_learn_under_every_codec_and_send_less(world: World, feedback: str) -> None:
    for found in world.run(learn, METHODS, feedback, timeout_s=90):
        for method, (first, last, ratio) in zip(METHODS, found, strict=True):
            assert last < first * 0.7, method
            assert ratio < 0.75, method


class Faulty(Fp16Codec):
    """Fails on rank 1 at step 2, between two collectives."""

    @override
    def average(self, x: Tensor, group: dist.ProcessGroup, key: Key) -> Averaged:
        if key.step == 2 and group.rank() == 1:
            raise CompressionError("a message of rank 0 is damaged", from_rank=0)
        return super().average(x, group, key)


def fail_in_background(bucket: DdpConfig) -> tuple[int, str]:
    compressor = GradientCompressor(CompressConfig(method="fp16", warmup_steps=0, skip_below_numel=0), codec=Faulty())
    model = DistributedDataParallel(build(), bucket, compression=compressor)
    [(x, y)] = share()
    for step in range(4):
        try:
            backward(nn.functional.mse_loss(model(x), y))
        except CommunicationError as error:
            assert dist.get_rank() == 0
            return step, str(error)
        except CompressionError as error:
            assert dist.get_rank() == 1
            grads = [param.grad for param in model.parameters() if param.grad is not None]
            assert any(bool(grad.isnan().all()) for grad in grads), "nobody takes these for gradients"
            return step, str(error)
    return -1, ""


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_failure_in_the_background_reaches_backward_on_all_ranks_with_the_reason(world: World, backend: str) -> None:
    [(first, told), (second, raised)] = world.run(fail_in_background, SMALL, backend=backend)
    assert (first, second) == (2, 2)
    assert raised.startswith("a message of rank 0 is damaged")
    assert "the first to fail was rank 1: CompressionError: a message of rank 0 is damaged" in told


def lose_a_peer(compression: CompressConfig | None) -> str:
    model = DistributedDataParallel(build(), SMALL, compression=compression)
    [(x, y)] = share()
    loss = nn.functional.mse_loss(model(x), y)
    if dist.get_rank() == 1:
        os._exit(3)
    with pytest.raises(CommunicationError) as caught:
        backward(loss)
    return str(caught.value)


@pytest.mark.parametrize("compression", [None, CompressConfig(method="int8", warmup_steps=0)], ids=["none", "int8"])
def test_a_rank_that_dies_is_an_error_of_ours_on_the_others(world: World, compression: CompressConfig | None) -> None:
    outcomes = world.outcomes(lose_a_peer, compression)
    assert outcomes[1].exit_code == 3
    assert outcomes[0].is_ok, outcomes[0].trace
    assert "failed" in outcomes[0].value


def not_finite() -> None:
    """Loss scaling under compression: a bad step is seen by all ranks, and the next one is as if it never was."""
    config = CompressConfig(method="topk:0.1", warmup_steps=0, skip_below_numel=0)
    model = DistributedDataParallel(build(), SMALL, compression=config)
    [(x, y)] = share()
    backward(nn.functional.mse_loss(model(x), y))
    assert model.compressor is not None
    before = model.compressor.state_dict()["feedback"]["residuals"]
    model.zero_grad()
    bad = x.clone()
    if dist.get_rank() == 1:
        bad[0, 0] = math.nan
    backward(nn.functional.mse_loss(model(bad), y))
    assert all(bool(param.grad.isnan().all()) for param in model.parameters() if param.grad is not None)
    after = model.compressor.state_dict()["feedback"]["residuals"]
    assert before.keys() == after.keys()
    for name, residual in before.items():
        assert torch.equal(residual, after[name]), name


def changed_on_the_way() -> None:
    """Compression comes and goes, buckets change size, residuals follow their parameters."""
    config = CompressConfig(method="topk:0.1", warmup_steps=0, skip_below_numel=0, error_feedback_momentum=1.0)
    [(x, y)] = share()
    module = build()
    model = DistributedDataParallel(module, SMALL).with_compression(config)
    backward(nn.functional.mse_loss(model(x), y))
    compressor = model.compressor
    assert compressor is not None
    kept = compressor.state_dict()["feedback"]["residuals"]
    assert kept.keys() == {name for name, _ in module.named_parameters()}
    state = compressor.state_dict()
    model.zero_grad()
    backward(nn.functional.mse_loss(model(x), y))
    there = [param.grad.clone() for param in module.parameters() if param.grad is not None]
    again = DistributedDataParallel(module, DdpConfig(), compression=config)  # one bucket for all
    assert again.compressor is not None
    again.compressor.load_state_dict(state)
    assert torch.equal(again.compressor.state_dict()["feedback"]["residuals"]["0.weight"], kept["0.weight"])
    again.zero_grad()
    backward(nn.functional.mse_loss(again(x), y))
    assert len(again.bucket_info()) < len(model.bucket_info())
    assert again.compressor.num_steps == 2
    assert sum(float(one.norm()) for one in there) > 0
    again.with_compression(None)
    again.zero_grad()
    backward(nn.functional.mse_loss(again(x), y))
    assert again.compressor is None
    assert again.check_gradient_consistency() == []


def mixed_dtypes() -> None:
    """Half, brain and double parameters in one model: each in buckets of its own."""
    torch.manual_seed(0)
    module = nn.ModuleList([nn.Linear(40, 40).half(), nn.Linear(40, 40).bfloat16(), nn.Linear(40, 40).double()])

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = module

        @override
        def forward(self, x: Tensor) -> Tensor:
            return sum(
                (layer(x.to(next(layer.parameters()).dtype)).double().square().sum() for layer in self.layers),
                torch.zeros(()),
            )

    x = torch.full((2, 40), 0.1 * (dist.get_rank() + 1))
    config = CompressConfig(method="int8", warmup_steps=0, skip_below_numel=100)
    for compression in (None, config):
        model = DistributedDataParallel(Sum(), compression=compression)
        model.zero_grad()
        backward(model(x))
        assert model.check_gradient_consistency() == []
        for param in module.parameters():
            assert param.grad is not None
            assert param.grad.dtype == param.dtype


def uneven_inputs() -> None:
    """Rank 1 has more batches than rank 0, which takes part with zeros."""
    for compression in (None, CompressConfig(method="int8", warmup_steps=0, skip_below_numel=0)):
        model = DistributedDataParallel(nn.Linear(16, 1), compression=compression)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with model.join():
            for _ in range(2 + 2 * dist.get_rank()):
                [(x, y)] = share()
                optimizer.zero_grad()
                backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
        weights = [torch.empty(16) for _ in range(2)]
        dist.all_gather(weights, model.module.weight.detach()[0].clone())
        assert torch.equal(weights[0], weights[1])
    with pytest.raises(InvalidArgument, match="divide_by_initial_world_size=False"):
        model.join(divide_by_initial_world_size=False)


def test_compression_meets_the_unusual(world: World) -> None:
    world.run(in_turn, not_finite, changed_on_the_way, uneven_inputs, mixed_dtypes, timeout_s=60)
