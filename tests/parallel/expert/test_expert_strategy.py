"""A GPT with spread experts against the same GPT in one process: losses, norms, state, at every layout."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.bed.world import World
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.expert.expert_strategy import ExpertDataParallel
from torsh_distributed.parallel.expert.layer import auxiliary_loss
from torsh_distributed.parallel.mesh.mesh import Mesh
from torsh_distributed.plan import DdpConfig
from torsh_distributed.plan.sections.expert import ExpertConfig
from torsh_distributed.plan.sections.mesh import MeshConfig
from torsh_distributed.train.demos import gpt, moe

STEPS = 20
CLIP = 0.5
VOCABULARY = 20


def build(config: ExpertConfig, *, hot: bool = False) -> tuple[gpt.CharGPT, torch.optim.Optimizer]:
    """hot: expert 0 of each layer is a choice of nearly every token."""
    torch.manual_seed(3)
    model = moe.with_experts(gpt.CharGPT(VOCABULARY, width=16, num_layers=2, num_heads=2), config)
    for block in model.blocks if hot else ():
        assert isinstance(block, gpt.Block)
        nn.init.ones_(block.feed_forward_norm.bias)
        with torch.no_grad():
            block.feed_forward.get_parameter("router.gate.experts.weight")[0] += 0.3
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def batches() -> list[tuple[Tensor, Tensor]]:
    """Text with a rule in it (each character is the last plus one or two), so that the loss falls."""
    generator = torch.Generator().manual_seed(5)
    steps = torch.randint(1, 3, (STEPS, 8, 17), generator=generator)
    ids = steps.cumsum(dim=2) % VOCABULARY
    return [(batch[:, :-1], batch[:, 1:]) for batch in ids]


def loss_of(model: nn.Module, inner: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return gpt.next_character_loss(model(batch[0]), batch[1]) + auxiliary_loss(inner)


@functools.cache
def one_process(config: ExpertConfig, stop: int, *, hot: bool = False) -> tuple[list[float], list[float]]:
    """Plain torch: no wrapper, no ranks."""
    model, optimizer = build(config, hot=hot)
    losses, norms = [], []
    for batch in batches()[:stop]:
        optimizer.zero_grad()
        loss = loss_of(model, model, batch)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


class Job:
    """One rank's training, a few steps at a time."""

    def __init__(self, config: ExpertConfig, ep: int, *, hot: bool = False) -> None:
        model, self.optimizer = build(config, hot=hot)
        self.strategy = ExpertDataParallel(model, DdpConfig(), mesh=Mesh(MeshConfig(ep=ep)))
        self.strategy.attach(self.optimizer)

    def train(self, start: int, stop: int, *, num_pieces: int = 1) -> tuple[list[float], list[float]]:
        strategy, losses, norms = self.strategy, [], []
        for batch in batches()[start:stop]:
            size = len(batch[0]) // strategy.data_degree
            mine = slice(strategy.data_rank * size, (strategy.data_rank + 1) * size)
            pieces = list(zip(*(half[mine].chunk(num_pieces) for half in batch), strict=True))
            total = 0.0
            for number, piece in enumerate(pieces):
                with strategy.accumulating(is_last=number == len(pieces) - 1):
                    loss = loss_of(strategy.model, strategy.unwrapped, piece) / len(pieces)
                    mean = strategy.mean_loss(loss)
                    loss.backward()
                total += mean.wait()
            losses.append(total)
            norms.append(strategy.clip_grad_norm(CLIP))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses, norms


CASES = {
    "no drops": (ExpertConfig(num_experts=4, overflow="none"), STEPS),
    "drop": (ExpertConfig(num_experts=4, capacity_factor=0.8), 5),
    "reroute": (ExpertConfig(num_experts=4, overflow="reroute", capacity_factor=1.0), 5),
}


def train_all(eps: list[int]) -> dict[tuple[str, int], tuple[list[float], list[float]]]:
    return {(name, ep): Job(config, ep).train(0, stop) for ep in eps for name, (config, stop) in CASES.items()}


@pytest.mark.parametrize(("num_ranks", "eps"), [(2, [2]), pytest.param(4, [2, 4], marks=pytest.mark.matrix)])
def test_losses_and_norms_are_those_of_one_process(world: World, num_ranks: int, eps: list[int]) -> None:
    """At 4 ranks, ep 2 is ep 2 × dp 2. Drops are counted over all ranks, so that they too are those of one process."""
    expected = {name: one_process(config, stop) for name, (config, stop) in CASES.items()}
    assert expected["drop"][0] != pytest.approx(expected["no drops"][0][:5], abs=1e-3), "nothing was dropped"
    for by_case in world.run(train_all, eps, num_ranks=num_ranks, backend="shm", timeout_s=60):
        for (name, ep), (losses, norms) in by_case.items():
            assert losses == pytest.approx(expected[name][0], abs=1e-4), (name, ep)
            assert norms == pytest.approx(expected[name][1], abs=1e-4), (name, ep)
            assert losses[-1] < losses[0]


def accumulate() -> tuple[list[float], list[float]]:
    config = ExpertConfig(num_experts=4, overflow="none", load_balance_loss_coeff=0.0)
    return Job(config, 2).train(0, 5, num_pieces=2)


def test_microbatches_equal_one_large_batch(world: World) -> None:
    """Without the balance loss: a product of two means, it is of each microbatch."""
    config = ExpertConfig(num_experts=4, overflow="none", load_balance_loss_coeff=0.0)
    losses, norms = one_process(config, 5)
    for result in world.run(accumulate, num_ranks=4, backend="shm", timeout_s=60):
        assert result == (pytest.approx(losses, abs=1e-4), pytest.approx(norms, abs=1e-4))


def go_on(state: dict[str, Any] | None, ep: int, start: int, stop: int) -> tuple[list[float], dict[str, Any]]:
    job = Job(CASES["no drops"][0], ep)
    if state is not None:
        job.strategy.load_whole_state(job.optimizer, state)
    losses, _ = job.train(start, stop)
    return losses, job.strategy.whole_state(job.optimizer)


def test_a_state_saved_at_one_layout_goes_on_at_another(world: World) -> None:
    expected, _ = one_process(CASES["no drops"][0], 9)
    [(first, state), *_] = world.run(go_on, None, 2, 0, 3, backend="shm", timeout_s=60)
    assert state["model"]["blocks.0.feed_forward.experts.up"].shape[0] == 4
    assert state["optimizer"]["state"]["blocks.0.feed_forward.experts.up"]["exp_avg"].shape[0] == 4
    [(second, state), *_] = world.run(go_on, state, 4, 3, 6, num_ranks=4, backend="shm", timeout_s=60)
    [(third, _)] = world.run(go_on, state, 1, 6, 9, num_ranks=1, backend="shm", timeout_s=60)
    assert first + second + third == pytest.approx(expected, abs=1e-4)


def refused_loads() -> list[str]:
    job = Job(CASES["no drops"][0], 2)
    job.train(0, 1)
    state = job.strategy.whole_state(job.optimizer)
    name = "blocks.0.feed_forward.experts.up"
    wrong = {**state, "model": {**state["model"], name: state["model"][name][:3]}}
    with pytest.raises(InvalidArgument, match=r"state=\(3, 16, 32\), num_experts=4"):
        job.strategy.load_whole_state(job.optimizer, wrong)
    job.optimizer.state[job.strategy._experts[0]]["odd"] = torch.zeros(7)
    with pytest.raises(InvalidArgument, match=r"AdamW keeps odd .*\n.*shape=\(7,\), num_experts_here=2"):
        job.strategy.whole_state(job.optimizer)
    return sorted(state["model"])


def test_a_state_of_other_experts_is_refused(world: World) -> None:
    for names in world.run(refused_loads, backend="shm"):
        assert names == sorted(build(CASES["no drops"][0])[0].state_dict())
