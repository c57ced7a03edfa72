"""`sparse_gradients`: embeddings with sparse gradients train as in one process, at every stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.bed.world import World
from torsh_distributed.migrate import deepspeed

OPTIMIZERS = {"SparseAdam": torch.optim.SparseAdam, "Adagrad": torch.optim.Adagrad, "AdamW": torch.optim.AdamW}


def bags() -> nn.EmbeddingBag:
    torch.manual_seed(4)
    return nn.EmbeddingBag(10, 3, mode="sum", sparse=True)


def tokens(step: int, rank: int) -> Tensor:
    return torch.randint(0, 10, (2, 4), generator=torch.Generator().manual_seed(10 * step + rank))


def train_sparse() -> dict[tuple[int, str], list[float]]:
    """Runs on ranks."""
    found = {}
    for stage in range(4):
        for name, kind in OPTIMIZERS.items():
            if name == "SparseAdam" and stage:
                continue
            model = bags()
            config: dict[str, Any] = {
                "train_micro_batch_size_per_gpu": 2,
                "gradient_clipping": 1.0,
                "sparse_gradients": True,
                "zero_optimization": {"stage": stage},
            }
            engine = deepspeed.initialize(model=model, optimizer=kind(model.parameters(), lr=0.1), config=config)[0]
            losses = []
            for step in range(3):
                loss = engine(tokens(step, dist.get_rank())).square().sum()
                engine.backward(loss)
                engine.step()
                losses.append(float(loss.detach()))
            found[stage, name] = losses
    return found


def one_process(name: str) -> list[list[float]]:
    """By rank; gradients are clipped as dense ones, which have the same norm."""
    model = bags()
    optimizer = OPTIMIZERS[name](model.parameters(), lr=0.1)
    found: list[list[float]] = [[], []]
    for step in range(3):
        losses = [model(tokens(step, rank)).square().sum() for rank in range(2)]
        (sum(losses) / 2).backward()
        assert model.weight.grad is not None
        grad = model.weight.grad.coalesce()
        grad = grad * min(1.0, 1.0 / (float(grad.to_dense().norm()) + 1e-6))
        model.weight.grad = grad if name == "SparseAdam" else grad.to_dense()
        optimizer.step()
        optimizer.zero_grad()
        for rank in range(2):
            found[rank].append(float(losses[rank].detach()))
    return found


@pytest.mark.ranks
def test_sparse_gradients_train_as_in_one_process(world: World) -> None:
    by_rank = world.run(train_sparse, num_ranks=2, backend="torsh", timeout_s=60)
    expected = {name: one_process(name) for name in OPTIMIZERS}
    assert len(by_rank[0]) == 9
    for rank in range(2):
        for (stage, name), losses in by_rank[rank].items():
            assert losses == pytest.approx(expected[name][rank], rel=1e-4), (stage, name)
