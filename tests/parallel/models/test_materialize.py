"""Models on the meta device get the same weights on every rank, at every world size."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from tests.bed.world import World
from tests.parallel.golden import mlp
from tests.parallel.models.zoo import quiet_imports
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.models.materialize import Materializer
from torsh_distributed.parallel.sharded.module import FullyShardedDataParallel
from torsh_distributed.plan import FsdpConfig


def initialised(make: Callable[[], nn.Module], config: FsdpConfig, group: dist.ProcessGroup) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = make()
    before = torch.get_rng_state()
    wrapped = FullyShardedDataParallel(model, config, group=group, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    return wrapped.full_state_dict()


def all_initialised() -> list[dict[str, Tensor]]:
    """In groups of one, two and all four ranks."""
    found = []
    for size in (1, 2, 4):
        groups = [dist.new_group(list(range(first, first + size))) for first in range(0, 4, size)]
        mine = groups[dist.get_rank() // size]
        found += [initialised(mlp, FsdpConfig(wrap=wrap), mine) for wrap in ("auto", "none")]
    return found


def test_a_model_on_meta_begins_alike_at_every_world_size_and_cut(world: World) -> None:
    states = [state for states in world.run(all_initialised, num_ranks=4, timeout_s=60) for state in states]
    assert len(states) == 4 * 3 * 2
    for state in states:
        for name, value in state.items():
            torch.testing.assert_close(value, states[0][name], rtol=0, atol=0)
    weight = states[0]["2.weight"]
    assert weight.abs().max() <= 1 / math.sqrt(32), "as nn.Linear begins"
    assert weight.std() == pytest.approx(1 / math.sqrt(3 * 32), rel=0.1)
    assert not torch.equal(states[0]["0.weight"][:3, :3], weight[:3, :3])


class Bare(nn.Module):
    """A module with a parameter of its own that does not say how it begins."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.inner = nn.Linear(3, 3)
        self.twin = nn.Linear(3, 3)
        self.twin.weight = self.inner.weight

    @override
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.scale * self.twin(self.inner(x))
        return out


def meta_init_by_function() -> tuple[str, dict[str, Tensor]]:
    def fill(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            nn.init.constant_(param, 0.5)

    with torch.device("meta"):
        first, second = Bare(), Bare()
    with pytest.raises(InvalidArgument) as refusal:
        FullyShardedDataParallel(first)
    wrapped = FullyShardedDataParallel(second, param_init_fn=fill)
    assert second.twin.weight is second.inner.weight, "a shared parameter stays shared"
    wrapped(torch.ones(1, 3)).sum().backward()
    return str(refusal.value), wrapped.full_state_dict()


def test_a_module_without_reset_needs_a_function(world: World) -> None:
    for text, state in world.run(meta_init_by_function):
        assert "cannot initialize their parameters: Bare" in text
        assert all(torch.equal(value, torch.full_like(value, 0.5)) for value in state.values())


@pytest.mark.needs_library("transformers")
def test_what_a_block_says_about_its_layers_holds() -> None:
    """As transformers initializes: children first, then modules that begin smaller than their kind."""
    with quiet_imports():
        from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 64, "n_embd": 64, "n_layer": 8, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
    with torch.device("meta"):
        whole, parts = (GPT2LMHeadModel(GPT2Config(**sizes)) for _ in range(2))
    materializer = Materializer(whole, torch.device("cpu"), init_fn=None, seed=3)
    materializer.make(whole)
    block = whole.transformer.h[2]
    assert block.attn.c_attn.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for layer in (block.attn.c_proj, block.mlp.c_proj):
        assert layer.weight.std().item() == pytest.approx(0.02 / math.sqrt(2 * 8), rel=0.05)
    assert whole.lm_head.weight is whole.transformer.wte.weight
    in_parts = Materializer(parts, torch.device("cpu"), init_fn=None, seed=3)
    for piece in (parts.transformer.h[2].mlp.c_fc, parts.transformer.h[2], parts):
        in_parts.make(piece)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(parts.state_dict()[name], value, rtol=0, atol=0, msg=name)
