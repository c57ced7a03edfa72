"""Experts of `ep_size > 1` are on different ranks, and train as in one process."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.bed.world import World
from tests.migrate.deepspeed.moe import experts
from torsh_distributed.migrate import deepspeed
from torsh_distributed.migrate.deepspeed.moe.expert_modules import ExpertModules
from torsh_distributed.migrate.deepspeed.moe.moe_layer import MoE, is_moe_param
from torsh_distributed.migrate.deepspeed.ops import FusedLamb
from torsh_distributed.migrate.deepspeed.zero.fp32_weights import get_fp32_state_dict_from_zero_checkpoint

CALM: dict[str, Any] = {"k": 1, "ep_size": 2, "drop_tokens": False, "use_rts": False}
"""Nothing random, nothing that depends on which tokens a rank has."""
STEPS = 3


def engine_of(settings: dict[str, Any], given: dict[str, Any] = CALM) -> Any:
    model = experts.Model(MoE, **given)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


def train(engine: Any, first: int, num: int) -> list[float]:
    losses = []
    for number in range(first, first + num):
        loss = engine(experts.points(number, dist.get_rank()))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def spread(runs: list[dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    """Trains, saves, trains on, loads, trains on again: both continuations; and what this rank holds."""
    found = []
    for number, settings in enumerate(runs):
        engine = engine_of(settings)
        gas = settings["gradient_accumulation_steps"]
        losses = train(engine, 0, STEPS * gas)
        inner = engine.module.moe.deepspeed_moe.experts
        held = sum(getattr(param, "to_local", lambda param=param: param)().numel() for param in inner.parameters())
        state = {name: value.clone() for name, value in engine.module_state_dict().items()}
        engine.save_checkpoint(f"{folder}/{number}")
        further = train(engine, STEPS * gas, gas)
        engine.load_checkpoint(f"{folder}/{number}")
        again = train(engine, STEPS * gas, gas)
        engine.load_module_state_dict(state)
        back = {name: value.clone() for name, value in engine.module_state_dict().items()}
        norm = engine.get_global_grad_norm()
        marks = all(map(is_moe_param, inner.parameters()))
        found.append({"losses": losses, "held": held, "state": state, "again": (further, again), "norm": norm})
        found[-1].update(back=back, marks=marks, local=engine.module.moe.num_local_experts)
    return found


def whole_size() -> int:
    return sum(param.numel() for param in experts.Expert().parameters()) * experts.NUM_EXPERTS


def check(by_rank: list[list[dict[str, Any]]], runs: list[dict[str, Any]], folder: Path, held: list[int]) -> None:
    for number, settings in enumerate(runs):
        gas, clip = settings["gradient_accumulation_steps"], settings["gradient_clipping"]
        expected = experts.of_one_process(CALM, len(by_rank), gas, STEPS + 1, clip)
        for rank, of_rank in enumerate(by_rank):
            one = of_rank[number]
            assert one["losses"] == pytest.approx(expected[rank][: STEPS * gas], rel=1e-5), settings
            further, again = one["again"]
            assert further == again == pytest.approx(expected[rank][STEPS * gas :], rel=1e-5)
            assert one["held"] == held[number]
            assert one["marks"]
            assert one["local"] == experts.NUM_EXPERTS // 2
            assert one["norm"] == by_rank[0][number]["norm"]
            assert all(torch.equal(value, one["back"][name]) for name, value in one["state"].items())
        # A module in one process has the same names, and reads what was saved.
        plain = experts.Model(MoE, **CALM)
        plain.load_state_dict(by_rank[0][number]["state"])
        saved = get_fp32_state_dict_from_zero_checkpoint(folder / str(number))
        other = experts.Model(MoE, **CALM)
        other.load_state_dict(saved)
        for mine, read in zip(plain.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine, read)


def test_spread_experts_train_as_one_process_at_every_stage(world: World, tmp_path: Path) -> None:
    runs = [experts.config(0, gas=2, clip=0.5), experts.config(1), experts.config(2, clip=0.5)]
    by_rank = world.run(spread, runs, str(tmp_path), num_ranks=2)
    check(by_rank, runs, tmp_path, [whole_size() // 2] * 3)


@pytest.mark.matrix
@pytest.mark.timeout(180)
def test_four_ranks_have_two_copies_of_every_expert_or_shards_of_them(world: World, tmp_path: Path) -> None:
    runs = [experts.config(0, gas=2, clip=0.5), experts.config(1, gas=2), experts.config(2, clip=0.5)]
    by_rank = world.run(spread, runs, str(tmp_path), num_ranks=4, timeout_s=120.0)
    check(by_rank, runs, tmp_path, [whole_size() // 2, whole_size() // 4, whole_size() // 4])


def resumed(folder: str) -> list[float]:
    engine = engine_of(experts.config(0, gas=2, clip=0.5))
    engine.load_checkpoint(folder)
    return train(engine, STEPS * 2, 2)


def averaged_by_the_script() -> tuple[float, float]:
    """A script may average gradients itself before `step`; they must not be averaged twice."""
    engine = engine_of(experts.config(0))
    engine.backward(engine(experts.points(0, dist.get_rank())))
    engine.allreduce_gradients()
    stack = next(iter(engine.module.moe.deepspeed_moe.experts.parameters()))
    before = stack.grad.clone()
    engine.allreduce_gradients()
    return float(before.square().sum()), float(stack.grad.square().sum())


def test_a_checkpoint_is_read_in_another_world_and_gradients_are_averaged_once(world: World, tmp_path: Path) -> None:
    runs = [experts.config(0, gas=2, clip=0.5)]
    first = world.run(spread, runs, str(tmp_path), num_ranks=2)[0][0]["again"][0]
    [alone] = world.run(resumed, str(tmp_path / "0"), num_ranks=1)
    assert alone[0] == pytest.approx(first[0], rel=1e-5)
    for once, twice in world.run(averaged_by_the_script, num_ranks=2):
        assert once == twice


def kept_whole(name: str) -> tuple[int, list[float]]:
    """Optimizers whose update depends on whole tensors leave experts as they are."""
    model = experts.Model(MoE, **CALM)
    optimizer = FusedLamb(model.parameters(), lr=1e-2)
    with_stack = deepspeed.initialize(model=model, optimizer=optimizer, config=experts.config(0))[0]
    inner = with_stack.module.moe.deepspeed_moe.experts
    return len(inner.deepspeed_experts), train(with_stack, 0, 2)


def test_lamb_keeps_experts_whole(world: World) -> None:
    for num_experts, losses in world.run(kept_whole, "lamb", num_ranks=2):
        assert num_experts == experts.NUM_EXPERTS
        assert losses[1] != losses[0]


def test_experts_that_cannot_be_stacked_say_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    assert "buffers" in str(ExpertModules(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), 2).why_not_stacked())
    assert "matrix" in str(ExpertModules(nn.LayerNorm(2), 2).why_not_stacked())
    half = ExpertModules(nn.Linear(2, 2), 2)
    half.deepspeed_experts[1].requires_grad_(False)
    assert "frozen in part" in str(half.why_not_stacked())
    assert ExpertModules(nn.Linear(2, 2), 2).why_not_stacked() is None


def test_stacks_compute_what_the_modules_did() -> None:
    torch.manual_seed(1)
    layer = ExpertModules(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), 3)
    for expert in layer.deepspeed_experts:
        nn.init.normal_(expert[0].weight)
    rows, chosen = torch.randn(7, 3), torch.tensor([[0], [2], [0], [2], [2], [0], [0]])
    layer.eval()
    before = layer(rows, chosen, torch.ones(7, 1))
    layer.stack()
    torch.testing.assert_close(layer(rows, chosen, torch.ones(7, 1)), before)
    layer.train()
    assert not torch.equal(layer(rows, chosen, torch.ones(7, 1)), before)  # dropout is on again
    layer(rows, chosen, torch.ones(7, 1)).sum().backward()
    stack = next(iter(layer.parameters()))
    assert stack.grad is not None
    assert stack.grad[1].abs().sum() == 0  # no row chose it
