"""Rows of a whole tensor that a rank reads, where a piece of it is sharded further."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from typing_extensions import override

from tests.bed.world import World
from tests.parallel.weights.checkpoints import gpt
from torsh_distributed.parallel.expert import MoELayer
from torsh_distributed.parallel.models.materialize import Materializer
from torsh_distributed.parallel.weights.model_weights import HeldParts, Rows
from torsh_distributed.plan import ExpertConfig, Plan
from torsh_distributed.train import parallelize


class TwoRuns(HeldParts):
    """A piece of two runs of rows, as of fused layers that are cut, or of experts."""

    @override
    def runs(self, name: str, shape: object) -> Rows | None:
        return None if name == "columns" else [(1, 4), (6, 8)]


def rows_here() -> None:
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    five = distribute_tensor(torch.zeros(5, 2), mesh, [Shard(0)])
    assert TwoRuns().rows("one", (9, 2), five) == [[(1, 4)], [(6, 8)]][rank]
    assert TwoRuns().rows("columns", (9, 2), five) is None
    assert TwoRuns().rows("one", (9, 2), torch.zeros(5, 2)) == [(1, 4), (6, 8)]
    across = distribute_tensor(torch.zeros(5, 2), mesh, [Shard(1)])
    assert TwoRuns().rows("one", (9, 2), across) is None, "a shard by columns is cut out of the whole"
    four = distribute_tensor(nn.Parameter(torch.zeros(4, 2)), mesh, [Shard(0)])
    assert HeldParts().rows("one", (4, 2), four) == [[(0, 2)], [(2, 4)]][rank]
    single = distribute_tensor(torch.zeros(1), mesh, [Shard(0)])
    assert HeldParts().rows("one", (1,), single) == [[(0, 1)], []][rank]


def test_a_shard_of_a_piece_is_rows_of_its_runs(world: World) -> None:
    world.run(rows_here)


SGD = functools.partial(torch.optim.SGD, lr=0.1)


class Tied(nn.Module):
    """Its first and last stage share a table, and it counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    @override
    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + torch.relu(layer(hidden))
        out: Tensor = self.head(self.norm(hidden))
        return out


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.experts = MoELayer(8, 16, ExpertConfig(num_experts=4))

    @override
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.experts(self.first(x))
        return out


CASES: dict[int, list[tuple[type[nn.Module] | None, dict[str, Any]]]] = {
    2: [
        (None, {"dp": 1, "tp": 2}),
        (Tied, {"dp": 1, "pp": 2, "pipeline": {"num_microbatches": 2}}),
        (Sparse, {"dp": 1, "ep": 2}),
    ],
    4: [
        (None, {"dp": 1, "shard": 2, "cp": 2}),
        (None, {"dp": 1, "shard": 2, "tp": 2}),
        (None, {"dp": 1, "shard": 2, "pp": 2, "pipeline": {"num_microbatches": 2}}),
        (Sparse, {"dp": 1, "shard": 2, "ep": 2}),
        (Sparse, {"dp": 2, "ep": 2}),
    ],
}


def made(kind: type[nn.Module] | None) -> nn.Module:
    with torch.device("meta"):
        return gpt() if kind is None else kind()


def begins_alike(num_ranks: int) -> None:
    for kind, plan in CASES[num_ranks]:
        whole = made(kind)
        Materializer(whole, torch.device("cpu"), init_fn=None, seed=9).make(whole)
        model = made(kind)
        engine = parallelize(model, SGD, Plan(**{**plan, "training": {"seed": 9}}), loss_fn=nn.functional.mse_loss)
        held = sum(param.numel() for group in engine.optimizer.param_groups for param in _local(group["params"]))
        assert held < 0.8 * sum(param.numel() for param in whole.parameters()), plan
        state = engine.state_dict()["model"]
        for name, value in whole.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=0, msg=f"{plan}: {name}")


def _local(params: list[Any]) -> list[Tensor]:
    return [getattr(param, "_local_tensor", param) for param in params]


def test_a_split_model_begins_as_a_whole_one(world: World) -> None:
    world.run(begins_alike, 2, timeout_s=60)


@pytest.mark.matrix
def test_a_split_model_in_shards_begins_as_a_whole_one(world: World) -> None:
    world.run(begins_alike, 4, num_ranks=4, timeout_s=60)
