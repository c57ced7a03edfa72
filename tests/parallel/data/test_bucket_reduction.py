"""Gradients travel as the plan says, and training comes out as in one process."""

from __future__ import annotations

import hashlib
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torsh_distributed as td
from tests.bed.world import World
from tests.comm.algorithms.quick import quick_choice
from torsh_distributed.comm.recording.communication_stats import CommunicationStats
from torsh_distributed.comm.recording.flight_recorder import recorder
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.data.bucket_reduction import bucket_reducer
from torsh_distributed.plan.sections.distributed import DistributedConfig

BACKENDS = ["gloo", "shm", "torsh"]
NUM_SAMPLES, NUM_STEPS = 12, 4
BUCKETS = {"max_bucket_size_mb": 1.0}  # three of them
ALGORITHMS = ["auto", "ring", "tree", "doubling", "reduce_scatter_all_gather", "pipelined", "double_buffered"]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 500), nn.Tanh(), nn.Linear(500, 500), nn.Tanh(), nn.Linear(500, 500), nn.Linear(500, 1)
    )


def data() -> tuple[torch.Tensor, torch.Tensor]:
    points = torch.randn(NUM_SAMPLES, 16, generator=torch.Generator().manual_seed(1))
    return points, points.sum(dim=1, keepdim=True)


@quick_choice()
def train(distributed: dict[str, object]) -> tuple[list[float], str]:
    """Losses, and the bits of the parameters after the last step."""
    me, size = dist.get_rank(), dist.get_world_size()
    model = build()
    plan = td.Plan.from_dict({"distributed": distributed, "ddp": BUCKETS, "training": {"steps": NUM_STEPS}})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    engine = td.parallelize(model, optimizer, plan, loss_fn=nn.functional.mse_loss)
    points, targets = data()
    losses = [engine.step((points[me::size], targets[me::size])) for _ in range(NUM_STEPS)]
    digest = hashlib.sha256(b"".join(param.detach().numpy().tobytes() for param in model.parameters()))
    return losses, digest.hexdigest()


def losses_of_one_process() -> list[float]:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    points, targets = data()
    losses = []
    for _ in range(NUM_STEPS):
        loss = nn.functional.mse_loss(model(points), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_by_each() -> list[tuple[list[float], str]]:
    return [train({"algorithm": algorithm}) for algorithm in ALGORITHMS]


def test_every_algorithm_trains_as_one_process_does(world: World) -> None:
    expected = losses_of_one_process()
    by_rank = world.run(train_by_each, num_ranks=3, timeout_s=100)
    for algorithm, *found in zip(ALGORITHMS, *by_rank, strict=True):
        for losses, digest in found:
            assert losses == pytest.approx(expected, rel=1e-4), algorithm
            assert digest == found[0][1], algorithm


def test_deterministic_training_has_the_same_bits_on_every_backend_and_every_time(world: World) -> None:
    plans = [("gloo", "backend"), ("shm", "backend"), ("torsh", "pipelined"), ("gloo", "backend")]
    found = {
        digest
        for backend, algorithm in plans
        for _, digest in world.run(
            train, {"deterministic": True, "algorithm": algorithm}, num_ranks=3, backend=backend, timeout_s=60
        )
    }
    assert len(found) == 1


def train_slowly(gbps: float) -> tuple[list[float], float]:
    started_s = time.monotonic()
    losses, _ = train({"rate_limit_gbps": gbps})
    return losses, time.monotonic() - started_s


@pytest.mark.matrix
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rate_limit_slows_gradients_down_and_changes_nothing_else(world: World, backend: str) -> None:
    num_bytes = 4 * sum(param.numel() for param in build().parameters()) * NUM_STEPS
    gbps = num_bytes * 8 / 1e9 / 0.5  # half a second for all of them
    for losses, took_s in world.run(train_slowly, gbps, num_ranks=2, backend=backend, timeout_s=60):
        assert losses == pytest.approx(losses_of_one_process(), rel=1e-4)
        assert took_s > 0.4  # less what the bucket of tokens lets through at once


def counted() -> dict[str, int]:
    with CommunicationStats() as stats:
        train({})
    assert any("all_reduce" in record.op for record in recorder)
    return {op: figures.num_bytes for op, figures in stats.by_op.items()}


def test_statistics_fill_up_from_a_plain_training_loop(world: World) -> None:
    gradients = 4 * sum(param.numel() for param in build().parameters()) * NUM_STEPS
    means_and_counts = (4 + 8) * NUM_STEPS
    assert [figures["all_reduce"] for figures in world.run(counted)] == [gradients + means_and_counts] * 2


@pytest.mark.parametrize(
    "config",
    [{"algorithm": "ring"}, {"deterministic": True}, {"rate_limit_gbps": 1.0}],
    ids=lambda config: next(iter(config)),
)
def test_what_only_the_cpu_can_do_is_refused_elsewhere_before_the_first_step(config: dict[str, object]) -> None:
    group: dist.ProcessGroup = object()  # type: ignore[assignment]  # refused before anybody looks at it
    with pytest.raises(ConfigurationError, match="for models on the CPU only"):
        bucket_reducer(DistributedConfig(**config), group, torch.device("cuda", 0))


def test_a_plan_refuses_an_order_that_its_algorithm_cannot_keep() -> None:
    with pytest.raises(ConfigurationError, match="'ring' does not add in the order of ranks"):
        td.Plan.from_dict({"distributed": {"deterministic": True, "algorithm": "ring"}})
