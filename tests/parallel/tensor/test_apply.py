"""Whole models split over ranks train as one process does."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.bed.world import World
from tests.parallel.reference import batches, build, train_alone
from torsh_distributed.errors import ConfigurationError, InvalidArgument, TensorShapeMismatch
from torsh_distributed.parallel.tensor import layers, param_cuts, tensor_parallel, tensor_parallel_context
from torsh_distributed.plan import TensorConfig
from torsh_distributed.train.demos.gpt import next_character_loss

CONFIGS = {
    "plain": TensorConfig(),
    "sequence": TensorConfig(sequence_parallel=True),
    "loss": TensorConfig(loss_parallel=True),
    "both": TensorConfig(sequence_parallel=True, loss_parallel=True),
}


def train(kind: str, config: TensorConfig, num_steps: int = 5) -> list[float]:
    """A loop of one's own around a split model: only losses, without clipping."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    model = build(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)  # before the split: parameters keep their identity
    plan = tensor_parallel(model, mesh, config)
    losses = []
    for inputs, targets in batches(num_steps):
        optimizer.zero_grad()
        with tensor_parallel_context(plan):
            loss = next_character_loss(model(inputs), targets)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    held = sum(param.numel() for param in model.parameters())
    whole = sum(param.numel() for param in build(kind).parameters())
    assert held < whole * (0.7 if size == 2 else 0.5), "parameters were not split"
    assert param_cuts(model)
    return losses


def train_all(cases: list[tuple[str, str]]) -> list[list[float]]:
    return [train(kind, CONFIGS[config]) for kind, config in cases]


def check(world: World, cases: list[tuple[str, str]], num_ranks: int, backend: str) -> None:
    expected = {kind: train_alone(kind, clip=1e9)[::2] for kind, _ in cases}
    for results in world.run(train_all, cases, num_ranks=num_ranks, backend=backend, timeout_s=60):
        for (kind, config), losses in zip(cases, results, strict=True):
            assert losses == pytest.approx(expected[kind], abs=1e-4), (kind, config)


SHORT = [("gpt", "plain"), ("llama", "sequence"), ("gpt", "loss"), ("tied", "both")]
EVERY = [(kind, config) for kind in ("gpt", "tied", "llama") for config in CONFIGS]


@pytest.mark.parametrize("cases", [SHORT, pytest.param(EVERY, marks=pytest.mark.matrix)], ids=["some", "every"])
def test_losses_at_tp_2_are_those_of_one_process(world: World, cases: list[tuple[str, str]]) -> None:
    check(world, cases, 2, "torsh")


@pytest.mark.matrix
def test_losses_at_tp_4_are_those_of_one_process(world: World) -> None:
    check(world, [("gpt", "plain"), ("tied", "both")], 4, "gloo")


def train_as_before_sections() -> list[list[float]]:
    """As where DTensor cannot view the output of a fused layer as heads, which torch 2.13 is the first to do."""
    layers._VIEWS_SECTIONS = False
    return train_all([("gpt", "plain"), ("tied", "both")])


def test_a_fused_layer_whose_output_cannot_be_viewed_is_gathered(world: World) -> None:
    for gpt, tied in world.run(train_as_before_sections, num_ranks=2, backend="torsh", timeout_s=60):
        assert gpt == pytest.approx(train_alone("gpt", clip=1e9)[::2], abs=1e-4)
        assert tied == pytest.approx(train_alone("tied", clip=1e9)[::2], abs=1e-4)


def refuse() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    with pytest.raises(ConfigurationError, match="of the planned size"):
        tensor_parallel(build(), init_device_mesh("cpu", (1, dist.get_world_size())))
    with pytest.raises(InvalidArgument, match="a tied parameter would be cut in two ways"):
        tensor_parallel(build("tied"), mesh, overrides={"head": "row"})
    model = build()
    plan = tensor_parallel(model, mesh, CONFIGS["sequence"])
    with tensor_parallel_context(plan), pytest.raises(TensorShapeMismatch, match="a sequence of 5 does not split over"):
        model(torch.zeros(1, 5, dtype=torch.long))


def look() -> None:
    """Outside training a split model takes prompts of any length and gives whole logits, as the whole model does."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    whole, split = build(), build()
    tensor_parallel(split, mesh, CONFIGS["both"])
    prompt = torch.arange(5).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(split(prompt), whole(prompt))
        torch.testing.assert_close(split(prompt[:, :4]), whole(prompt[:, :4]))


def test_a_split_model_can_be_looked_at(world: World) -> None:
    world.run(look, num_ranks=2)


def test_what_does_not_fit_is_refused_on_every_rank(world: World) -> None:
    world.run(refuse, num_ranks=2)
