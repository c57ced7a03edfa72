"""Experts of other libraries spread over ranks: outputs and gradients of the whole module."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.bed.world import World
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.expert.placed_experts import placed_experts
from torsh_distributed.parallel.expert.stacked_experts import cut_stack, gather_stack

EXPERTS, WIDTH, TOKENS = 4, 6, 10


class Stack(nn.Module):
    """Experts as transformers keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH))
        self.down_bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            token, choice = torch.where(top_k_index == expert)
            inner = torch.relu(hidden[token] @ self.up[expert].t()) @ self.down[expert].t() + self.down_bias[expert]
            out = out.index_add(0, token, inner * top_k_weights[token, choice, None])
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Stack()


def inputs(rank: int, *, chosen: int = EXPERTS) -> tuple[Tensor, Tensor, Tensor]:
    """A rank's tokens; all experts they choose are below `chosen`."""
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).requires_grad_()
    index = torch.stack([torch.randperm(chosen, generator=generator)[:2] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, 2, generator=generator).requires_grad_()
    return hidden, index, weights


def compare(chosen: int) -> None:
    """Against the whole module on the tokens of all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    whole, model = Model(), Model()
    model.load_state_dict(whole.state_dict())
    placed = placed_experts(model)["experts"]
    group = dist.group.WORLD
    assert group is not None
    placed.spread(group)
    assert placed_experts(model)["experts"] is placed
    hidden, index, weights = inputs(rank, chosen=chosen)
    out = model.experts(hidden, index, weights)
    out.square().sum().backward()
    everyone = [inputs(one, chosen=chosen) for one in range(size)]
    for one in everyone:
        whole.experts(*one).square().sum().backward()
    torch.testing.assert_close(out, whole.experts(*everyone[rank]))
    torch.testing.assert_close(hidden.grad, everyone[rank][0].grad)
    # A sum over all of an expert's outputs, which are grouped otherwise here: its bits depend on the machine.
    torch.testing.assert_close(weights.grad, everyone[rank][2].grad, rtol=1e-5, atol=1e-5)
    for name, param in placed.stacked().items():
        expected = whole.experts.get_parameter(name)
        torch.testing.assert_close(param.grad, cut_stack(expected.grad, placed))
        torch.testing.assert_close(gather_stack(param, placed), expected)


def compare_all() -> None:
    compare(EXPERTS)
    compare(2)  # no token comes to the last rank


def test_spread_experts_compute_as_whole_ones(world: World) -> None:
    world.run(compare_all, num_ranks=2, backend="gloo")
    world.run(compare_all, num_ranks=EXPERTS, backend="torsh")  # one expert on each rank


def test_what_cannot_be_spread_is_refused() -> None:
    placed = placed_experts(Model())["experts"]
    with pytest.raises(ConfigurationError, match=r"experts: 4 experts do not spread evenly over mesh.ep 3"):
        placed.check("experts", 3)
    placed.check("experts", 4)
    model = Model()
    model.experts.forward = lambda hidden: hidden  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError, match="not called with"):
        placed_experts(model)["experts"].check("experts", 2)
