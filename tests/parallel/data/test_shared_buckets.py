"""DDP's buckets in memory that ranks share: the training of torch's DDP on gloo, and never a collective too many."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from tests.bed.world import World
from tests.parallel.example_models import backward
from torsh_distributed.comm.backends.shm.core import load_native
from torsh_distributed.parallel.data.ddp import DistributedDataParallel
from torsh_distributed.plan import DdpConfig
from torsh_distributed.plan.sections.distributed import DistributedConfig

pytestmark = pytest.mark.skipif(
    load_native() is None, reason="the core is not compiled: no C compiler was found at install"
)

WIDTH = 300
BUCKETS = DdpConfig(min_bucket_size_mb=0.3, max_bucket_size_mb=0.5)  # several, some too small to be shared


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 5), nn.BatchNorm1d(5))


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, 5, generator=generator)


def train(ddp: TorchDDP, steps: range, *, num_pieces: int = 1) -> None:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for number in steps:
        for _ in range(num_pieces - 1):
            with ddp.no_sync():
                backward(nn.functional.mse_loss(ddp(batch(number)[0]), batch(number)[1]))
        backward(nn.functional.mse_loss(ddp(batch(number)[0]), batch(number)[1]))
        optimizer.step()
        optimizer.zero_grad()


def shared_of(ddp: DistributedDataParallel) -> list[bool]:
    """Of buckets that were looked at, whether they are shared."""
    buckets = ddp._gradient_sync._buckets
    return [] if buckets is None else [one is not None for one in buckets._shared.values()]


def values(ddp: TorchDDP) -> list[Tensor]:
    return [param.detach().clone() for param in ddp.parameters()]


def trained_by_torch(options: dict[str, Any], num_steps: int, num_pieces: int) -> list[Tensor]:
    ddp = TorchDDP(model(), **options)
    train(ddp, range(num_steps), num_pieces=num_pieces)
    return values(ddp)


def trained_by_us(bucket: DdpConfig, num_pieces: int) -> tuple[int, list[Tensor], bool]:
    ddp = DistributedDataParallel(model(), bucket)
    train(ddp, range(2), num_pieces=num_pieces)
    train(ddp, range(2, 6), num_pieces=num_pieces)
    backward(ddp(batch(9)[0]).sum())
    views = [param.grad for param in ddp.parameters() if param.grad is not None]
    is_view = any(grad.is_shared() for grad in views)
    assert all(shared_of(ddp))
    return len(shared_of(ddp)), values(ddp), is_view


@pytest.mark.parametrize(
    ("settings", "num_pieces"),
    [({}, 1), ({"gradient_as_bucket_view": False}, 2), ({"find_unused_parameters": True}, 1), ({"overlap": False}, 1)],
)
def test_training_is_that_of_torchs_ddp(world: World, settings: dict[str, Any], num_pieces: int) -> None:
    expected = world.run(trained_by_torch, {}, 6, num_pieces, num_ranks=3, backend="gloo")[0]
    bucket = BUCKETS.model_copy(update=settings)
    for num_shared, found, is_view in world.run(trained_by_us, bucket, num_pieces, num_ranks=3, backend="torsh"):
        assert num_shared >= 3
        assert is_view == bucket.gradient_as_bucket_view
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def train_unevenly(kind: type[TorchDDP], is_generic: bool) -> list[Tensor]:
    """Ranks have one, three and five batches: some run out before buckets would be shared."""
    layers = model()[:-1]  # running means would be sent in forward, which those who are out do not call
    ddp = DistributedDataParallel(layers, BUCKETS) if kind is DistributedDataParallel else TorchDDP(layers)
    with Join([ddp]) if is_generic else ddp.join():
        train(ddp, range(1 + 2 * dist.get_rank()))
    return values(ddp)


@pytest.mark.parametrize("is_generic", [False, True])
def test_ranks_that_run_out_of_data_are_not_waited_for(world: World, is_generic: bool) -> None:
    expected = world.run(train_unevenly, TorchDDP, is_generic, num_ranks=3, backend="gloo")[0]
    for found in world.run(train_unevenly, DistributedDataParallel, is_generic, num_ranks=3, backend="torsh"):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def train_sparse() -> tuple[list[bool], Tensor, Tensor]:
    """A large embedding beside a large layer, four steps: its sparse gradients go their own way."""
    found = []
    for kind in (DistributedDataParallel, TorchDDP):
        torch.manual_seed(0)
        ddp = kind(nn.Sequential(nn.Embedding(500, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for number in range(4):
            ids = torch.arange(8) * (1 + number) + dist.get_rank()
            backward(ddp(ids).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        found.append(ddp)
    ours, torchs = found
    assert isinstance(ours, DistributedDataParallel)
    return (
        shared_of(ours),
        torch.cat([p.flatten() for p in values(ours)]),
        torch.cat([p.flatten() for p in values(torchs)]),
    )


def test_sparse_gradients_are_left_alone(world: World) -> None:
    for shared, ours, torchs in world.run(train_sparse, backend="shm"):
        assert shared == [True]
        torch.testing.assert_close(ours, torchs)


def kinds_of_travel() -> list[list[bool]]:
    """What is shared, by how gradients travel: only as they are, through the backend, can they use it."""
    found = []
    for options in (
        {"distributed": DistributedConfig(algorithm="ring")},
        {"reduce_dtype": "bf16"},
        {"compression": "fp16"},
        {"bucket": BUCKETS.model_copy(update={"bucketing": False})},
    ):
        bucket = options.pop("bucket", BUCKETS)
        ddp = DistributedDataParallel(model(), bucket, **options)  # type: ignore[arg-type]  # each as it is named
        train(ddp, range(4))
        found.append(shared_of(ddp))
    return found


def test_what_travels_in_another_way_is_not_shared(world: World) -> None:
    assert world.run(kinds_of_travel, backend="shm", timeout_s=60) == [[[], [], [], []]] * 2


def two_models() -> None:
    """Each has its buckets, and one that is gone takes its memory along."""
    first, second = (DistributedDataParallel(model(), BUCKETS) for _ in range(2))
    for number in range(4):
        train(first, range(number, number + 1))
        train(second, range(number, number + 1))
    for one, other in zip(values(first), values(second), strict=True):
        assert torch.equal(one, other)
    expected = values(second)
    del first
    train(second, range(4, 6))
    again = DistributedDataParallel(model(), BUCKETS)
    train(again, range(4))
    for one, other in zip(values(again), expected, strict=True):
        assert torch.equal(one, other)


def test_models_do_not_meet_in_memory(world: World) -> None:
    world.run(two_models, backend="shm")
