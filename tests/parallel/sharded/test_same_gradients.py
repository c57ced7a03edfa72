"""A step in which ranks used different parameters is refused: FSDP2 would add gradients by their places."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from tests.bed.world import World
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.sharded import FullyShardedDataParallel
from torsh_distributed.plan import FsdpConfig


class TwoHeads(nn.Module):
    """Two heads of one size; which of them is used is up to the caller."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])

    @override
    def forward(self, inputs: Tensor, head: int) -> Tensor:
        found: Tensor = self.heads[head](self.body(inputs)).square().mean()
        return found


def train(strategy: str, heads: list[list[int]], device: str = "cpu") -> tuple[str, dict[str, Tensor]]:
    """Runs on every rank: a step for each entry, with the head that the entry has for this rank."""
    model = FullyShardedDataParallel(TwoHeads().to(device), FsdpConfig(strategy=strategy))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.attach(optimizer)
    said = ""
    for step in heads:
        torch.manual_seed(dist.get_rank())
        model(torch.randn(3, 4).to(device), step[dist.get_rank()]).backward()
        try:
            optimizer.step()
        except ConfigurationError as error:
            said = str(error)
            break
        optimizer.zero_grad()
    return said, {name: value.cpu() for name, value in model.full_state_dict().items()}


def alone(heads: list[int]) -> dict[str, Tensor]:
    """The same steps in one process, where all ranks use one head."""
    model = TwoHeads()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for head in heads:
        losses = []
        for rank in range(2):
            torch.manual_seed(rank)
            losses.append(model(torch.randn(3, 4), head))
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


ON_GPU = pytest.param("full_shard", "cuda", "torsh", marks=pytest.mark.needs_cuda)


@pytest.mark.parametrize(
    ("strategy", "device", "backend"), [("shard_grad_op", "cpu", "gloo"), ("full_shard", "cpu", "gloo"), ON_GPU]
)
def test_ranks_that_used_other_heads_are_refused_before_the_update(
    world: World, strategy: str, device: str, backend: str
) -> None:
    for said, state in world.run(train, strategy, [[0, 0], [0, 1]], device, num_ranks=2, backend=backend):
        assert "rank 0 has no gradient of ['heads.1.weight', 'heads.1.bias']" in said
        assert "rank 1 has ['heads.0.weight', 'heads.0.bias']" in said
        assert "add" in said
        torch.testing.assert_close(state, dict(alone([0])), msg="the step before counts, the refused one does not")


def test_a_head_that_no_rank_uses_is_left_alone_as_in_one_process(world: World) -> None:
    for said, state in world.run(train, "full_shard", [[0, 0], [1, 1], [0, 0]], num_ranks=2, backend="gloo"):
        assert said == ""
        torch.testing.assert_close(state, dict(alone([0, 1, 0])))
