"""DistributedDataParallel against one process on the same data, and all that it tells about itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from tests.bed.world import World
from tests.comm.backends.mpi.world import MpiWorld
from tests.parallel.example_models import (
    NUM_STEPS,
    SMALL,
    backward,
    build,
    data,
    flat,
    in_turn,
    share,
    steps_of_one_process,
)
from torsh_distributed import events
from torsh_distributed.errors import ConfigurationError, InvalidArgument
from torsh_distributed.parallel.data.ddp import DistributedDataParallel
from torsh_distributed.plan import CompressConfig, DdpConfig


def train(bucket: DdpConfig, options: dict[str, Any], *, num_micro: int = 1, by_hand: bool = False) -> list[Tensor]:
    """The parameters after each step; rank 1 begins with others, which must not matter."""
    model = DistributedDataParallel(build(seed=dist.get_rank()), bucket, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for _ in range(NUM_STEPS):
        model.zero_grad()
        pieces = share(num_micro)
        for number, (x, y) in enumerate(pieces):
            if by_hand or number < len(pieces) - 1:
                with model.no_sync():
                    backward(nn.functional.mse_loss(model(x), y) / num_micro)
            else:
                backward(nn.functional.mse_loss(model(x), y) / num_micro)
        if by_hand:
            model.sync_gradients()
        assert model.check_gradient_consistency() == []
        optimizer.step()
        found.append(flat(model))
    return found


WAYS: list[tuple[DdpConfig, dict[str, Any], dict[str, Any]]] = [
    (DdpConfig(), {}, {}),
    (SMALL, {}, {}),
    (SMALL.replace(overlap=False), {}, {}),
    (SMALL.replace(bucketing=False), {}, {}),
    (SMALL.replace(gradient_as_bucket_view=True), {}, {}),
    (SMALL.replace(static_graph=True), {}, {}),
    (SMALL.replace(auto_size=True), {}, {}),
    (SMALL, {}, {"num_micro": 3}),
    (SMALL, {}, {"num_micro": 3, "by_hand": True}),
    (SMALL.replace(bucketing=False), {}, {"by_hand": True}),
    (SMALL, {"reduce_dtype": "fp32"}, {}),
    (SMALL, {"compression": CompressConfig(method="topk:0.01", warmup_steps=99)}, {}),
    (SMALL, {"compression": CompressConfig(method="int8", skip_names=("*",), warmup_steps=0)}, {}),
    (SMALL.replace(overlap=False), {"compression": CompressConfig(method="sign", warmup_steps=99)}, {}),
    (SMALL, {"compression": CompressConfig(method="powersgd:2", warmup_steps=99)}, {"by_hand": True}),
]
"""Settings that change how gradients travel, not what they are."""


def train_each_way() -> list[list[Tensor]]:
    return [train(bucket, options, **how) for bucket, options, how in WAYS]


@pytest.mark.parametrize("num_ranks", [1, 3, *(pytest.param(count, marks=pytest.mark.matrix) for count in (2, 4))])
def test_every_way_trains_as_one_process_does(world: World, num_ranks: int) -> None:
    expected = {micro: steps_of_one_process(num_ranks, num_micro=micro) for micro in (1, 3)}
    for ways in world.run(train_each_way, num_ranks=num_ranks, timeout_s=90):
        for (bucket, options, how), found in zip(WAYS, ways, strict=True):
            for one, other in zip(found, expected[how.get("num_micro", 1)], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, msg=f"{bucket} {options} {how}")


# --- features -------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Uses `second` only if told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 1)
        self.second = nn.Linear(16, 1)

    @override
    def forward(self, x: Tensor, use_second: bool = False) -> Tensor:
        out: Tensor = self.first(x)
        return out + self.second(x) if use_second else out


def unused_parameters() -> None:
    [(x, _)] = share()
    model = DistributedDataParallel(Branches())
    backward(model(x).sum())
    assert model.unused_parameters() == ["second.weight", "second.bias"]
    with pytest.raises(InvalidArgument, match=r"got no gradient in the last backward: second\.weight, second\.bias"):
        model(x)
    model = DistributedDataParallel(Branches(), DdpConfig(find_unused_parameters=True))
    # Used on one rank alone: it has a gradient on all of them.
    for use, unused in ((dist.get_rank() == 0, []), (False, ["second.weight", "second.bias"])):
        model.zero_grad()
        backward(model(x, use).sum())
        assert model.unused_parameters() == unused
        assert model.check_gradient_consistency() == []
    by_hand = DistributedDataParallel(Branches())
    with by_hand.no_sync():
        backward(by_hand(x, dist.get_rank() == 0).sum())
    by_hand.sync_gradients()
    expected = data()[0][0::2].sum(0) / 2
    assert by_hand.module.second.weight.grad is not None
    torch.testing.assert_close(by_hand.module.second.weight.grad[0], expected, rtol=1e-5, atol=1e-5)


class Lookup(nn.Module):
    """Its gradient is sparse where it is told so."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 3)

    @override
    def forward(self, ids: Tensor, is_sparse: bool) -> Tensor:
        return nn.functional.embedding(ids, self.table.weight, sparse=is_sparse)


def sparse_on_one_rank() -> None:
    model = DistributedDataParallel(Lookup())
    with model.no_sync():
        backward(model(torch.tensor([1, 2]), dist.get_rank() == 1).sum())
    with pytest.raises(InvalidArgument, match=r"sparse gradients cannot be averaged by hand: table\.weight"):
        model.sync_gradients()


def figures_and_hooks() -> None:
    [(x, y)] = share()
    seen: list[events.Event] = []
    end = events.subscribe(seen.append, events.BucketEvent)
    model = DistributedDataParallel(build(), SMALL, compression=CompressConfig(method="int8", warmup_steps=1))
    assert not model.has_gradients()
    assert model.bucket_info() == []
    for _ in range(2):
        model.zero_grad()
        backward(nn.functional.mse_loss(model(x), y))
    end()
    assert model.has_gradients()
    stats, infos = model.sync_stats(), model.bucket_info()
    total = sum(param.numel() for param in model.parameters()) * 4 / 2**20
    assert (stats.num_parameters, stats.num_with_gradient, stats.world_size) == (8, 8, 2)
    assert stats.gradient_size_mb == pytest.approx(total)
    assert sum(info.size_mb for info in infos) == pytest.approx(total)
    assert sorted(name for info in infos for name in info.parameter_names) == sorted(
        name for name, _ in model.module.named_parameters()
    )
    assert sum(info.num_parameters for info in infos) == 8
    codecs = [event.codec for event in seen if isinstance(event, events.BucketEvent)]
    assert set(codecs) == {"none", "int8"}
    overlap = model.overlap_stats()
    assert overlap is not None
    assert overlap.num_steps == 2
    assert 0 <= overlap.hidden_s <= overlap.comm_s
    assert overlap.exposed_s == overlap.comm_s - overlap.hidden_s
    assert (model.take_comm_s() or 0) == pytest.approx(overlap.comm_s)

    handle = model.with_compression(None).register_gradient_hook(lambda name, grad: grad * 0 + len(name))
    model.zero_grad()
    backward(nn.functional.mse_loss(model(x), y))
    for name, param in model.module.named_parameters():
        assert param.grad is not None
        assert bool((param.grad == len(name)).all()), name
    handle.remove()
    model.bucketing_enabled = False
    model.zero_grad()
    backward(nn.functional.mse_loss(model(x), y))
    assert model.check_gradient_consistency() == []


def odd_gradient() -> None:
    rank = dist.get_rank()
    [(x, y)] = share()
    model = DistributedDataParallel(build())
    backward(nn.functional.mse_loss(model(x), y))
    params = dict(model.module.named_parameters())
    if rank == 1:
        grad = params["3.bias"].grad
        assert grad is not None
        grad[5] += 1e-7
    if rank == 0:
        params["0.weight"].grad = None
    found = model.check_gradient_consistency()
    assert [(one.name, one.ranks) for one in found] == [("0.weight", (1,)), ("3.bias", (1,))]
    assert str(found[1]) == "3.bias on rank 1"


def low_precision() -> None:
    [(x, y)] = share()
    exact = DistributedDataParallel(build())
    backward(nn.functional.mse_loss(exact(x), y))
    for dtype, limit in (("fp16", 1e-3), ("bf16", 1e-2)):
        model = DistributedDataParallel(build(), SMALL, reduce_dtype=dtype)  # type: ignore[arg-type]
        backward(nn.functional.mse_loss(model(x), y))
        for one, other in zip(exact.parameters(), model.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert one.grad.dtype == other.grad.dtype
            assert float((one.grad - other.grad).norm()) <= limit * float(one.grad.norm()) + 1e-7
        assert model.check_gradient_consistency() == []


def refusals() -> None:
    rank = dist.get_rank()
    with pytest.raises(ConfigurationError, match=r"rank 0 has compress None, rank 1 has .*'int8'"):
        DistributedDataParallel(build(), compression="int8" if rank == 1 else None)
    with pytest.raises(ConfigurationError, match=r"rank 0 has ddp \{'max_bucket_size_mb': 2.0\}, rank 1 has .*3.0"):
        DistributedDataParallel(build(), DdpConfig(max_bucket_size_mb=2.0 + rank))
    table = nn.Sequential(nn.Embedding(4, 4, sparse=True))
    with pytest.raises(InvalidArgument, match="sparse gradients cannot be compressed: 0"):
        DistributedDataParallel(table, compression="int8")
    with pytest.raises(InvalidArgument, match="reduce_dtype and compression exclude each other"):
        DistributedDataParallel(build(), compression="int8", reduce_dtype="fp16")
    hooked = DistributedDataParallel(build(), SMALL)
    hooked.register_gradient_hook(lambda name, grad: grad[:1])
    [(x, y)] = share()
    with pytest.raises((RuntimeError, InvalidArgument), match="changed the shape"):
        backward(nn.functional.mse_loss(hooked(x), y))


def test_figures_checks_and_refusals(world: World) -> None:
    parts = (unused_parameters, sparse_on_one_rank, figures_and_hooks, odd_gradient, low_precision, refusals)
    world.run(in_turn, *parts, timeout_s=60)


def on_a_backend() -> list[Tensor]:
    train(SMALL, {"reduce_dtype": "bf16"})
    for method in ("int8", "topk:0.1", "powersgd:2"):
        train(SMALL, {"compression": CompressConfig(method=method, warmup_steps=1, skip_below_numel=0)})
    return train(SMALL, {}, num_micro=3, by_hand=True)


@pytest.mark.parametrize("backend", ["shm", "torsh"])
def test_it_works_on_every_backend(world: World, backend: str) -> None:
    expected = steps_of_one_process(2, num_micro=3)
    for found in world.run(on_a_backend, backend=backend, timeout_s=60):
        torch.testing.assert_close(found[-1], expected[-1], rtol=1e-5, atol=1e-5)


@pytest.mark.needs_mpi
def test_it_works_on_mpi(mpi_world: MpiWorld) -> None:
    expected = steps_of_one_process(2, num_micro=3)
    for found in mpi_world.run(on_a_backend, timeout_s=60):
        torch.testing.assert_close(found[-1], expected[-1], rtol=1e-5, atol=1e-5)


def alone_without_buckets() -> None:
    """The bucket's memory would be a second copy of the gradients, held while they are cleared."""
    [(x, y)] = share(1)
    model = DistributedDataParallel(build())
    assert not hasattr(model, "reducer")
    with model.no_sync():
        backward(nn.functional.mse_loss(model(x), y))
    once = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    model.sync_gradients()
    backward(nn.functional.mse_loss(model(x), y))
    for param, first in zip(model.parameters(), once, strict=True):
        assert param.grad is not None
        torch.testing.assert_close(param.grad, 2 * first)
        assert param.grad.untyped_storage().nbytes() == param.grad.nbytes, "a view of no bucket"
    assert model.unused_parameters() == []
    assert model.check_gradient_consistency() == []
    stats = model.sync_stats()
    assert (stats.num_with_gradient, stats.num_buckets, stats.world_size) == (8, 0, 1)
    assert (model.bucket_info(), model.take_comm_s()) == ([], 0.0)
    assert list(model.state_dict()) == [f"module.{name}" for name in build().state_dict()]
    model.zero_grad()
    names: list[str] = []
    model.register_gradient_hook(lambda name, grad: names.append(name))
    backward(nn.functional.mse_loss(model(x), y))
    assert sorted(names) == sorted(name for name, _ in model.module.named_parameters())
    model.with_compression("int8").zero_grad()
    backward(nn.functional.mse_loss(model(x), y))
    assert model.sync_stats().compression is not None


def compression_in_two_forms() -> None:
    model = DistributedDataParallel(build(), reduce_dtype="bf16")
    with pytest.raises(InvalidArgument, match="reduce_dtype and compression exclude each other"):
        model.with_compression("int8")
    assert model.compressor is None


def test_a_world_of_one_has_no_buckets_until_something_asks_for_them(world: World) -> None:
    world.run(alone_without_buckets, num_ranks=1)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_compression_is_refused_later_as_at_the_start(world: World, num_ranks: int) -> None:
    world.run(compression_in_two_forms, num_ranks=num_ranks)
