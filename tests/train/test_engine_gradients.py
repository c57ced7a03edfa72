"""Gradients of an Engine's step are those of its own losses, and whole when a script looks at them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.bed.world import World
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize
from torsh_distributed.train.losses.step_weights import global_mean

STEPS, ROWS, WIDTH = 4, 8, 6


def network(num_outputs: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, num_outputs))


def rows(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(STEPS)]


def judged(scores: Tensor, is_real: bool) -> Tensor:
    return functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(is_real)))


def adversarial_alone() -> list[float]:
    """Two networks, one trained against the other, in plain torch."""
    maker, judge = network(WIDTH, 1), network(1, 2)
    makers, judges = (torch.optim.Adam(one.parameters(), lr=0.02) for one in (maker, judge))
    losses = []
    for real, noise in zip(rows(3), rows(4), strict=True):
        made = maker(noise)
        judges.zero_grad()
        loss = judged(judge(real), True) + judged(judge(made.detach()), False)
        loss.backward()
        judges.step()
        makers.zero_grad()
        fooled = judged(judge(made), True)
        fooled.backward()
        makers.step()
        losses += [loss.item(), fooled.item()]
    return losses


def adversarial(mesh: dict[str, int]) -> list[float]:
    """The same with two Engines; backward of the one goes through the model of the other."""
    maker, judge = network(WIDTH, 1), network(1, 2)
    plan = Plan(mesh=mesh, training={"steps": STEPS, "batch_size": ROWS})
    makers, judges = (parallelize(one, torch.optim.Adam(one.parameters(), lr=0.02), plan) for one in (maker, judge))
    losses = []
    for real, noise in makers.batches(list(zip(rows(3), rows(4), strict=True))):
        made = makers.model(noise)
        judges.backward(judged(judges.model(real), True) + judged(judges.model(made.detach()), False))
        first = judges.apply()
        makers.backward(judged(judges.model(made), True))
        losses += [first, makers.apply()]
    return losses


@pytest.mark.ranks
@pytest.mark.parametrize("mesh", [{}, {"shard": 2}], ids=str)
def test_a_backward_through_another_engines_model_adds_nothing_to_its_next_step(
    world: World, mesh: dict[str, int]
) -> None:
    expected = adversarial_alone()
    for losses in world.run(adversarial, mesh):
        assert losses == pytest.approx(expected, rel=1e-5)


def after_a_first_look() -> tuple[list[float], list[float]]:
    found = []
    for leaves_gradients in (False, True):
        model = network(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        batch = rows(3)[0], torch.arange(ROWS) % 3
        if leaves_gradients:
            functional.cross_entropy(model(batch[0]), batch[1]).backward()
        engine = parallelize(model, optimizer, Plan(), loss_fn=functional.cross_entropy)
        found.append([engine.step(batch) for _ in range(2)])
    return found[0], found[1]


def test_gradients_from_before_training_are_not_used(world: World) -> None:
    ((clean, after_a_look),) = world.run(after_a_first_look, num_ranks=1)
    assert after_a_look == clean


def summed(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return functional.cross_entropy(outputs, labels, reduction="sum"), (labels != -100).sum()


def uneven() -> list[tuple[Tensor, Tensor]]:
    batches = []
    for step, inputs in enumerate(rows(3)):
        labels = torch.arange(ROWS) % 3
        labels[ROWS - 1 - step :] = -100
        batches.append((inputs, labels))
    return batches


def clipped_by_the_script(num_passes: int) -> list[float]:
    model = network(3, 1)
    plan = Plan(training={"steps": STEPS, "gradient_accumulation": num_passes})
    engine = parallelize(model, torch.optim.SGD(model.parameters(), lr=1.0), plan, loss_fn=summed)
    losses = []
    for batch in engine.batches(uneven()):
        for piece in engine.microbatches(batch):
            engine.backward(engine.forward(piece))
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        losses.append(engine.apply())
    return losses


def test_a_script_that_clips_sees_the_gradient_of_the_step(world: World) -> None:
    (expected,) = world.run(clipped_by_the_script, 1, num_ranks=1)
    (losses,) = world.run(clipped_by_the_script, 2, num_ranks=1)
    assert losses == pytest.approx(expected, rel=1e-5)


def evaluated(loss_is: str) -> float:
    model = network(3, 1)
    plan = Plan(training={"loss_is": loss_is})

    def of_all(outputs: Tensor, labels: Tensor) -> Tensor:
        return global_mean(*summed(outputs, labels))

    def of_own(outputs: Tensor, labels: Tensor) -> Tensor:
        return summed(outputs, labels)[0]

    loss_fn = of_all if loss_is == "global_mean" else of_own
    engine = parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, loss_fn=loss_fn)
    return engine.evaluate(with_a_last_one())


def with_a_last_one() -> list[tuple[Tensor, Tensor]]:
    """The last batch has one sample: other ranks borrow it."""
    inputs, labels = (torch.cat(parts) for parts in zip(*uneven(), strict=True))
    labels = labels.clamp(min=0)
    return [(inputs[start : start + ROWS], labels[start : start + ROWS]) for start in (0, ROWS)] + [
        (inputs[-1:], labels[-1:])
    ]


@pytest.mark.ranks
@pytest.mark.parametrize("loss_is", ["sum", "global_mean"])
def test_an_evaluation_does_not_depend_on_the_number_of_ranks(world: World, loss_is: str) -> None:
    model = network(3, 1)
    with torch.no_grad():
        sums = [float(summed(model(inputs), labels)[0]) for inputs, labels in with_a_last_one()]
    expected = sum(sums) / (3 if loss_is == "sum" else 2 * ROWS + 1)
    for num_ranks in (1, 2, 3):
        for value in world.run(evaluated, loss_is, num_ranks=num_ranks):
            assert value == pytest.approx(expected, rel=1e-5)


def trained_on_a_last_one() -> list[float]:
    model = network(3, 1)

    def of_all(outputs: Tensor, labels: Tensor) -> Tensor:
        return global_mean(*summed(outputs, labels))

    plan = Plan(training={"loss_is": "global_mean", "steps": 3})
    engine = parallelize(model, torch.optim.SGD(model.parameters(), lr=0.5), plan, loss_fn=of_all)
    return [engine.step(batch) for batch in engine.batches(with_a_last_one()[::-1])]


@pytest.mark.ranks
def test_a_borrowed_sample_counts_nothing_in_a_global_mean(world: World) -> None:
    (expected,) = world.run(trained_on_a_last_one, num_ranks=1)
    for losses in world.run(trained_on_a_last_one, num_ranks=2):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_a_global_mean_in_passes_is_refused() -> None:
    plan = Plan(training={"loss_is": "global_mean", "gradient_accumulation": 2})
    with pytest.raises(ConfigurationError, match="a step has several"):
        plan.validate(1)


def own_loss(training: dict[str, Any]) -> tuple[list[float], str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torsh_distributed")
    logger.addHandler(handler)
    model = network(3, 1)
    engine = parallelize(model, torch.optim.SGD(model.parameters(), lr=0.5), Plan(training={"steps": 3, **training}))
    losses = []
    for inputs, labels in engine.batches(uneven()):
        if training.get("loss_is") == "global_mean":
            loss = global_mean(*summed(engine.model(inputs), labels))
        else:
            loss = summed(engine.model(inputs), labels)[0]
        engine.backward(loss)
        losses.append(engine.apply())
    logger.removeHandler(handler)
    return losses, "\n".join(said)


@pytest.mark.ranks
@pytest.mark.parametrize("loss_is", ["sum", "global_mean"])
def test_a_loss_that_the_engine_did_not_compute_weighs_as_declared(world: World, loss_is: str) -> None:
    ((expected, _),) = world.run(own_loss, {"loss_is": loss_is}, num_ranks=1)
    for losses, said in world.run(own_loss, {"loss_is": loss_is}):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert "did not compute" not in said


@pytest.mark.ranks
def test_a_loss_of_which_nothing_is_known_is_named_once(world: World) -> None:
    said = [said for _, said in world.run(own_loss, {})]
    assert said[0].count("a loss that engine.forward() did not compute") == 1
    assert "did not compute" not in said[1]
