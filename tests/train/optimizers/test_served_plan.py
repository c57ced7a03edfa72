"""Plans with `server.training`: the Engine's steps are those of the equations, and it saves, resumes and evaluates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torsh_distributed as td
from tests.bed.world import World
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan import Plan

pytestmark = pytest.mark.ranks
NUM_STEPS, SAVED_AT = 6, 3
RATE, ALPHA, PERIOD = 0.1, 0.3, 2


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(8, 6, generator=generator), torch.randn(8, 1, generator=generator)) for _ in range(NUM_STEPS)]


def plan_of(server: dict[str, Any]) -> Plan:
    return Plan(server=server, training={"batch_size": 8, "steps": NUM_STEPS, "loss_is": "mean"})


def make(server: dict[str, Any], **optimizer: Any) -> td.Engine:
    net = model()
    return td.parallelize(
        net,
        torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9, **optimizer),
        plan_of(server),
        loss_fn=nn.functional.mse_loss,
    )


def flat(net: nn.Module) -> Tensor:
    return torch.cat([param.detach().reshape(-1) for param in net.parameters()])


def part_of(batch: tuple[Tensor, Tensor], rank: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    rows = slice(rank * 8 // num_ranks, (rank + 1) * 8 // num_ranks)
    return batch[0][rows], batch[1][rows]


def take_turns(path: str) -> tuple[Tensor, Tensor, float, float]:
    """Asynchronous, with ranks in turn, so that the order is known; another Engine goes on from the middle."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    engine = make({"training": "asynchronous"})
    for step, batch in enumerate(batches()):
        for turn in range(num_ranks):
            if turn == rank:
                engine.step(part_of(batch, rank, num_ranks))
            dist.barrier()
        if step == SAVED_AT - 1:
            engine.save(path)
    loss = engine.evaluate([batches()[0]])
    straight = flat(engine.unwrapped)
    resumed = make({"training": "asynchronous"})
    resumed.load(path)
    assert resumed.num_steps == SAVED_AT
    for batch in batches()[SAVED_AT:]:
        for turn in range(num_ranks):
            if turn == rank:
                resumed.step(part_of(batch, rank, num_ranks))
            dist.barrier()
    resumed_loss = resumed.evaluate([batches()[0]])
    return straight, flat(resumed.unwrapped), loss, resumed_loss


def test_asynchronous_steps_are_those_of_the_optimizer_one_after_the_other(world: World, tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9)
    copies = [model() for _ in range(2)]
    for step, batch in enumerate(batches()):
        for rank, copy in enumerate(copies):
            # A rank computes with what it took after its own last step.
            optimizer.zero_grad()
            inputs, targets = part_of(batch, rank, 2)
            nn.functional.mse_loss(copy(inputs), targets).backward()
            for param, mine in zip(net.parameters(), copy.parameters(), strict=True):
                param.grad, mine.grad = mine.grad, None
            optimizer.step()
            copy.load_state_dict(net.state_dict())
        if step == SAVED_AT - 1:  # to save, all ranks take the newest
            copies[0].load_state_dict(net.state_dict())
    inputs, targets = batches()[0]
    expected = nn.functional.mse_loss(net(inputs), targets).item()
    results = world.run(take_turns, str(tmp_path / "ckpt"), num_ranks=2)
    for straight, resumed, loss, resumed_loss in results:
        torch.testing.assert_close(straight, flat(net))
        torch.testing.assert_close(resumed, straight)
        assert loss == resumed_loss == pytest.approx(expected, rel=1e-5)


def move_to_the_centre(path: str) -> tuple[Tensor, Tensor, Tensor]:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    server = {"training": "elastic_averaging", "alpha": ALPHA, "period": PERIOD}
    engine = make(server)
    for step, batch in enumerate(batches()):
        engine.step(part_of(batch, rank, num_ranks))
        if step == SAVED_AT - 1:
            engine.save(path)
    resumed = make(server)
    resumed.load(path)
    for batch in batches()[SAVED_AT:]:
        resumed.step(part_of(batch, rank, num_ranks))
    own = flat(engine.unwrapped)
    engine.export(Path(path).parent / "model")  # the centre
    assert torch.equal(own, flat(engine.unwrapped))
    return own, flat(resumed.unwrapped), torch.tensor(engine.evaluate([batches()[0]]))


def test_elastic_averaging_follows_its_equations(world: World, tmp_path: Path) -> None:
    nets, center = [model() for _ in range(2)], flat(model())
    optimizers = [torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9) for net in nets]
    for step, batch in enumerate(batches(), start=1):
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            optimizer.zero_grad()
            inputs, targets = part_of(batch, rank, 2)
            nn.functional.mse_loss(net(inputs), targets).backward()
            optimizer.step()
        if step % PERIOD == 0:
            moves = [ALPHA * (flat(net) - center) for net in nets]
            for net, move in zip(nets, moves, strict=True):
                torch.nn.utils.vector_to_parameters(flat(net) - move, net.parameters())
            center = center + sum(moves)
    whole = model()
    torch.nn.utils.vector_to_parameters(center, whole.parameters())
    inputs, targets = batches()[0]
    results = world.run(move_to_the_centre, str(tmp_path / "ckpt"), num_ranks=2)
    for net, (own, resumed, loss) in zip(nets, results, strict=True):
        torch.testing.assert_close(own, flat(net))
        torch.testing.assert_close(resumed, own)
        assert loss.item() == pytest.approx(nn.functional.mse_loss(whole(inputs), targets).item(), rel=1e-5)


def refused() -> str:
    net = model()
    groups = [{"params": [param]} for param in net.parameters()]
    with pytest.raises(ConfigurationError) as caught:
        td.parallelize(net, torch.optim.SGD(groups, lr=RATE), plan_of({"training": "asynchronous"}))
    return str(caught.value)


def test_groups_of_parameters_are_refused(world: World) -> None:
    assert all("several groups" in text for text in world.run(refused, num_ranks=1))


@pytest.mark.parametrize(
    "other",
    [
        {"mesh": {"shard": 2}},
        {"compress": {"method": "int8"}},
        {"precision": {"dtype": "fp16"}},
        {"training": {"sync_batch_norm": True}},
        {"elastic": {"enabled": True}},
    ],
)
def test_what_ranks_do_together_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"server\.training"):
        Plan(server={"training": "asynchronous"}, **other).validate(2)
