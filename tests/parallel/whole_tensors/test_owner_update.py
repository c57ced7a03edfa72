"""Optimizers over whole tensors: settings, state that was there before, checkpoints, and who keeps what."""

from __future__ import annotations

import functools
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from tests.bed.world import World
from tests.parallel.reference import BATCH, batches, build
from tests.parallel.whole_tensors.optimizer_cases import AXES, Lamb, Lars, SignSgd, squashed, steps_of
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.migrate.deepspeed.ops import MuonWithAuxAdam
from torsh_distributed.plan import Plan
from torsh_distributed.train import Engine, parallelize
from torsh_distributed.train.demos.gpt import next_character_loss

SPLIT = ["shard", "zero1", "tp"]
LONG = pytest.mark.matrix
CLIP = 0.3


def in_groups(model: nn.Module, kind: Any, **settings: Any) -> Optimizer:
    """Two groups with different rates."""
    matrices = [param for param in model.parameters() if param.dim() == 2]
    others = [param for param in model.parameters() if param.dim() != 2]
    optimizer: Optimizer = kind([{"params": matrices, "lr": 5e-3}, {"params": others, "lr": 2e-2}], **settings)
    return optimizer


def muon_and_adam(model: nn.Module) -> Optimizer:
    """Muon, in fp32, for one group, and Adam for the other."""
    matrices = [param for param in model.parameters() if param.dim() == 2]
    others = [param for param in model.parameters() if param.dim() != 2]
    return MuonWithAuxAdam(
        [
            {"params": matrices, "use_muon": True, "lr": 0.01, "weight_decay": 0.1},
            {"params": others, "use_muon": False, "lr": 3e-3, "eps": 1e-4},
        ]
    )


OPTIMIZERS: dict[str, Any] = {
    "Adafactor": partial(in_groups, kind=torch.optim.Adafactor, weight_decay=0.1),
    "Adafactor, foreach": partial(in_groups, kind=torch.optim.Adafactor, foreach=True),
    "Adagrad": partial(in_groups, kind=torch.optim.Adagrad, initial_accumulator_value=0.1, eps=1e-5),
    "AdamW, fused": partial(in_groups, kind=torch.optim.AdamW, fused=True, eps=1e-4),
    "AdamW, foreach": partial(in_groups, kind=torch.optim.AdamW, foreach=True, eps=1e-4, amsgrad=True),
    "Rprop, foreach": partial(in_groups, kind=torch.optim.Rprop, foreach=True),
    "Lamb": partial(in_groups, kind=Lamb),
    "Lars": partial(in_groups, kind=Lars),
    "Muon and Adam": muon_and_adam,
}


def model_of() -> nn.Module:
    """One block is frozen."""
    model: Any = build("gpt")
    model.blocks[0].requires_grad_(False)
    return model


def plan_of(axis: str, **training: Any) -> Plan:
    settings = {"batch_size": BATCH, "gradient_clipping": CLIP, **training}
    return Plan.model_validate({**AXES[axis], "training": settings})


def engine_of(axis: str, name: str, num_steps_before: int = 0, **training: Any) -> Engine:
    model = model_of()
    optimizer = OPTIMIZERS[name](model)
    losses_of(model, optimizer, 0, num_steps_before)
    return parallelize(model, optimizer, plan_of(axis, **training), loss_fn=next_character_loss)


def losses_of(model: nn.Module, optimizer: Optimizer, first: int, last: int) -> list[float]:
    """Steps of plain torch in one process."""
    losses = []
    for inputs, targets in batches(last)[first:]:
        optimizer.zero_grad()
        loss = next_character_loss(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())
    optimizer.zero_grad()
    return losses


@functools.cache
def alone(name: str) -> list[float]:
    model = model_of()
    return losses_of(model, OPTIMIZERS[name](model), 0, 6)


def train(axis: str, names: list[str]) -> list[list[float]]:
    return [steps_of(engine_of(axis, name, gradient_accumulation=2)) for name in names]


@pytest.mark.parametrize("axis", [pytest.param("shard", marks=LONG), pytest.param("zero1", marks=LONG), "tp"])
def test_groups_frozen_parameters_clipping_and_accumulation(world: World, axis: str) -> None:
    names = ["Adafactor", "Lars", "Muon and Adam"]
    for found in world.run(train, axis, names, backend="torsh", timeout_s=110):
        for name, losses in zip(names, found, strict=True):
            assert losses == pytest.approx(alone(name), rel=1e-5), name


@pytest.mark.matrix
@pytest.mark.parametrize("axis", SPLIT)
def test_forms_of_the_update(world: World, axis: str) -> None:
    names = ["Adafactor, foreach", "AdamW, fused", "AdamW, foreach", "Rprop, foreach", "Lamb"]
    for found in world.run(train, axis, names, backend="torsh", timeout_s=110):
        for name, losses in zip(names, found, strict=True):
            assert losses == pytest.approx(alone(name), rel=1e-5), name


def go_on(axis: str, names: list[str]) -> list[list[float]]:
    return [steps_of(engine_of(axis, name, num_steps_before=3), 3, 6) for name in names]


@pytest.mark.parametrize("axis", ["shard", pytest.param("tp", marks=LONG)])
def test_an_optimizer_goes_on_with_the_state_it_has(world: World, axis: str) -> None:
    names = ["Adagrad", "Adafactor", "AdamW, foreach"]
    for found in world.run(go_on, axis, names, backend="torsh", timeout_s=110):
        for name, losses in zip(names, found, strict=True):
            assert losses == pytest.approx(alone(name)[3:], rel=1e-5), (axis, name)


def save_and_load(first: str, second: str, name: str, path: Path) -> list[list[float]]:
    """Three steps under one plan and three under another: from a checkpoint, and from the state in memory."""
    engine = engine_of(first, name)
    steps_of(engine, 0, 3)
    engine.save(path)
    state = engine.state_dict()
    from_files, from_memory = engine_of(second, name), engine_of(second, name)
    from_files.load(path)
    from_memory.load_state_dict(state)
    return [steps_of(from_files, 3, 6), steps_of(from_memory, 3, 6)]


def only_load(name: str, path: Path) -> list[float]:
    engine = engine_of("dp", name)
    engine.load(path)
    return steps_of(engine, 3, 6)


@pytest.mark.parametrize(
    ("first", "second", "name"),
    [
        ("shard", "tp", "Adafactor"),
        pytest.param("tp", "zero1", "Lamb", marks=LONG),
        pytest.param("zero1", "shard", "Muon and Adam", marks=LONG),
        pytest.param("zero1", "pp", "Adafactor", marks=LONG),
        pytest.param("pp", "shard", "Lamb", marks=LONG),
        pytest.param("tp", "shard", "Muon and Adam", marks=LONG),
    ],
)
def test_a_checkpoint_fits_every_other_plan_and_world(
    world: World, tmp_path: Path, first: str, second: str, name: str
) -> None:
    expected = alone(name)[3:]
    for found in world.run(save_and_load, first, second, name, tmp_path, backend="torsh", timeout_s=110):
        for losses in found:
            assert losses == pytest.approx(expected, rel=1e-5)
    (found_alone,) = world.run(only_load, name, tmp_path, num_ranks=1, backend="torsh", timeout_s=110)
    assert found_alone == pytest.approx(expected, rel=1e-5)


def kept_elements(axis: str, name: str) -> tuple[int, int]:
    """Elements of the optimizer's state on this rank, and of one process's."""
    engine = engine_of(axis, name)
    steps_of(engine, 0, 1)
    model = model_of()
    optimizer = OPTIMIZERS[name](model)
    losses_of(model, optimizer, 0, 1)
    return _num_elements(engine.optimizer), _num_elements(optimizer)


def _num_elements(optimizer: Optimizer) -> int:
    values = [value for one in optimizer.state.values() for value in one.values() if isinstance(value, torch.Tensor)]
    return sum((value.to_local() if hasattr(value, "to_local") else value).numel() for value in values if value.dim())


@pytest.mark.parametrize("axis", [pytest.param("shard", marks=LONG), "zero1"])
def test_the_ranks_together_keep_the_state_once(world: World, axis: str) -> None:
    (first, whole), (second, _) = world.run(kept_elements, axis, "Lamb", backend="torsh", timeout_s=110)
    assert first + second == whole
    assert 0.3 < first / whole < 0.7


def who_gets_whole_tensors(axis: str) -> dict[str, bool]:
    """Whether each optimizer's parameters are moved for its steps."""
    makers: dict[str, Any] = {
        "AdamW": partial(torch.optim.AdamW, lr=1e-3),
        "SignSgd": partial(SignSgd, rule=squashed),
        "Lars": Lars,
        "declared": declared,
    }
    found = {}
    for name, maker in makers.items():
        engine = parallelize(build("gpt"), maker, plan_of(axis), loss_fn=next_character_loss)
        found[name] = bool(engine.strategy._owner_updates)
    return found


def declared(params: Any) -> Optimizer:
    made: Any = Lars(params)
    made.torsh_needs = "elements"
    return made


@pytest.mark.parametrize("axis", [pytest.param("zero1", marks=LONG), "tp"])
def test_only_what_needs_whole_tensors_gets_them(world: World, axis: str) -> None:
    # Lars computes with DTensors, whose norms are those of the whole.
    expected = {"AdamW": False, "SignSgd": False, "Lars": axis == "tp", "declared": False}
    for found in world.run(who_gets_whole_tensors, axis, backend="torsh", timeout_s=110):
        assert found == expected


class Secretive(SignSgd):
    """Cannot be tried: it asks whose parameters it has."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch's is overloaded
        if self.param_groups[0]["params"][0].numel() == 288:
            raise RuntimeError("not mine")
        super().step(closure)


def train_secretly() -> tuple[list[float], list[str]]:
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torsh_distributed").addHandler(handler)
    model = build("gpt")
    optimizer = Secretive([{"params": [param]} for param in model.parameters()], squashed)  # type: ignore[list-item]
    engine = parallelize(model, optimizer, plan_of("tp", gradient_clipping=None), loss_fn=next_character_loss)
    return steps_of(engine), seen


def test_an_optimizer_that_cannot_be_tried_gets_whole_tensors_and_says_so(world: World) -> None:
    model = build("gpt")
    optimizer = SignSgd(model.parameters(), squashed)
    losses = []
    for inputs, targets in batches(6):
        optimizer.zero_grad()
        loss = next_character_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    (first, seen), (second, _) = world.run(train_secretly, backend="torsh", timeout_s=110)
    assert first == pytest.approx(losses, rel=1e-5)
    assert second == pytest.approx(losses, rel=1e-5)
    assert any('torsh_needs = "elements"' in message for message in seen)


def add_later() -> None:
    engine = engine_of("tp", "Lamb")
    engine.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    steps_of(engine, 0, 1)


def test_parameters_that_nobody_owns_are_refused(world: World) -> None:
    with pytest.raises(InvalidArgument, match="that the model did not have in parallelize"):
        world.run(add_later, backend="torsh", timeout_s=110)
