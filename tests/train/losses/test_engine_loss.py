"""Losses that are not means over samples: on two and three ranks they are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.bed.world import World
from torsh_distributed.errors import ConfigurationError, NonFiniteLoss
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize

STEPS, ROWS, LENGTH, CLASSES = 4, 12, 5, 7
WEIGHTS = torch.tensor([0.1, 2.0, 0.0, 1.0, 3.0, 0.5, 1.0])


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(CLASSES, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def make_batches(*, lonely: bool = True) -> list[tuple[Tensor, Tensor]]:
    """Labels of -100 at the end of rows, very unevenly; no label of the first rank's rows counts in the last batch."""
    torch.manual_seed(4)
    batches = []
    for step in range(STEPS):
        tokens = torch.randint(CLASSES, (ROWS, LENGTH))
        labels = (tokens * 3 + 1) % CLASSES
        for row in range(ROWS):
            labels[row, 1 + (row * (step + 1)) % LENGTH :] = -100
        if step == STEPS - 1 and lonely:
            labels[: ROWS // 2] = -100
        batches.append((tokens, labels))
    return batches


def flat(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def selected(logits: Tensor, labels: Tensor) -> Tensor:
    mask = labels != -100
    return functional.cross_entropy(logits[mask], labels[mask]) if mask.any() else 0.0 * logits.sum()


def of_sum(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    each = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100)
    return each.sum(), (labels != -100).sum()


def with_penalty(logits: Tensor, labels: Tensor) -> Tensor:
    return 0.5 * flat(logits, labels) + 0.25


def two_means(logits: Tensor, labels: Tensor) -> Tensor:
    """As question answering has it: two means over the same rows."""
    both = [functional.cross_entropy(logits[:, place], labels[:, 0]) for place in (0, 1)]
    return (both[0] + both[1]) / 2


def transposed(loss: Callable[[Tensor, Tensor], Tensor], logits: Tensor, labels: Tensor) -> Tensor:
    return loss(logits.transpose(1, 2), labels)


def contrast(outputs: Tensor, targets: Tensor) -> Tensor:
    features = functional.normalize(outputs.mean(dim=1), dim=-1)
    return functional.cross_entropy(features @ features.T, torch.arange(len(features)))


LOSSES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "flat": flat,
    "selected": selected,
    "sum and count": of_sum,
    "penalty": with_penalty,
    "two means": two_means,
    "module": partial(transposed, nn.CrossEntropyLoss()),
    "class weights": partial(transposed, nn.CrossEntropyLoss(weight=WEIGHTS)),
    "sum": partial(transposed, nn.CrossEntropyLoss(reduction="sum")),
    "contrastive": contrast,
    "own sum": lambda logits, labels: 0.01 * (logits - labels[..., None].clamp(min=0)).square().sum(),
    "other index": lambda logits, labels: functional.cross_entropy(
        logits.transpose(1, 2), labels.masked_fill(labels == -100, 6), ignore_index=6
    ),
}


def largest(number: int, logits: Tensor, labels: Tensor) -> Tensor:
    """The mean of the samples with the largest losses."""
    each = functional.cross_entropy(logits.mean(dim=1), labels[:, 0].clamp(min=0), reduction="none")
    return each.topk(number).values.mean()


def with_deviation(number: int, logits: Tensor, labels: Tensor) -> Tensor:
    """A penalty for outputs that are alike, which is NaN where one sample is left after the first `number`."""
    return functional.mse_loss(logits[:, 0, 0], labels[:, 0].float()) - 0.1 * logits[number:, 0].std(dim=0).mean()


def flooded(logits: Tensor, labels: Tensor) -> Tensor:
    """Turns at a level that training reaches later."""
    return (flat(logits, labels) - 0.02).abs() + 0.02


NO_HALVES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "largest": partial(largest, ROWS // 2 - 1),
    "deviation": partial(with_deviation, ROWS // 4 - 1),
}
"""Losses that couple samples and have no value for half of the rows of a rank."""


def plain(loss_fn: Callable[[Tensor, Tensor], Any], batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    """One process and torch alone."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for tokens, labels in batches:
        optimizer.zero_grad()
        value = loss_fn(model(tokens), labels)
        loss = value[0] / value[1] if isinstance(value, tuple) else value
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(name: str, plan: dict[str, Any], by_loader: bool = True) -> list[float]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    training = {"steps": STEPS, "batch_size": ROWS, **plan.pop("training", {})}
    engine = parallelize(
        model, optimizer, Plan(training=training, **plan), loss_fn=(LOSSES | NO_HALVES | {"flooded": flooded})[name]
    )
    batches = make_batches()
    if by_loader:
        return [engine.step(batch) for batch in engine.batches(batches)]
    # The user's own shares: uneven, and not known to the Engine.
    rank, cut = engine.strategy.data_rank, 3
    rows = slice(0, cut) if rank == 0 else slice(cut, ROWS)
    return [engine.step((tokens[rows], labels[rows])) for tokens, labels in batches]


SEPARABLE = [name for name in LOSSES if name != "contrastive"]


def train_with_each(accumulation: int) -> list[list[float]]:
    return [train(name, {"training": {"gradient_accumulation": accumulation}}) for name in SEPARABLE]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_two_ranks_have_the_losses_of_one_process(world: World, accumulation: int) -> None:
    for found in world.run(train_with_each, accumulation):
        for name, losses in zip(SEPARABLE, found, strict=True):
            assert losses == pytest.approx(plain(LOSSES[name], make_batches()), rel=1e-5), name


def losses_after_an_empty_pass(name: str) -> list[float]:
    model = make_model()
    plan = Plan(training={"gradient_accumulation": 2})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    engine = parallelize(model, optimizer, plan, loss_fn=LOSSES[name])
    return [engine.step(batch) for batch in with_an_empty_half()]


def with_an_empty_half() -> list[tuple[Tensor, Tensor]]:
    batches = [(tokens, labels.clone()) for tokens, labels in make_batches()]
    batches[0][1][: ROWS // 2] = -100
    return batches


@pytest.mark.parametrize("name", ["flat", "selected", "sum and count"])
def test_the_first_pass_of_all_may_have_no_label(world: World, name: str) -> None:
    expected = plain(LOSSES[name], with_an_empty_half())
    (losses,) = world.run(losses_after_an_empty_pass, name, num_ranks=1)
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["flat", "selected", "sum and count", "class weights", "sum"])
def test_shards_have_the_losses_of_one_process(world: World, name: str) -> None:
    for losses in world.run(train, name, {"mesh": {"shard": 2}}):
        assert losses == pytest.approx(plain(LOSSES[name], make_batches()), rel=1e-5)


@pytest.mark.parametrize("name", ["flat", "selected", "sum"])
def test_batches_of_the_users_own_weigh_by_what_they_count(world: World, name: str) -> None:
    for losses in world.run(train, name, {}, False):
        assert losses == pytest.approx(plain(LOSSES[name], make_batches()), rel=1e-5)


@pytest.mark.parametrize("name", ["flat", "class weights", "sum"])
def test_pipelines_have_the_losses_of_one_process(world: World, name: str) -> None:
    for losses in world.run(train, name, {"mesh": {"pp": 2}, "pipeline": {"num_microbatches": 3}}):
        assert losses == pytest.approx(plain(LOSSES[name], make_batches()), rel=1e-5)


@pytest.mark.parametrize("name", ["contrastive", *NO_HALVES])
def test_a_loss_that_compares_samples_is_refused(world: World, name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)not made of the losses of its samples.*gather_for_loss"):
        world.run(train, name, {})


def test_a_loss_that_bends_its_mean_is_refused(world: World) -> None:
    with pytest.raises(ConfigurationError, match="not a multiple of a mean over the labels other than -100"):
        world.run(train, "flooded", {})


def test_a_batch_in_which_nothing_counts_is_not_a_number(world: World) -> None:
    with pytest.raises(NonFiniteLoss):
        world.run(train_on_nothing)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_sum_over_nothing_is_zero_as_in_one_process(world: World, accumulation: int) -> None:
    (expected,) = world.run(losses_around_nothing, 1, num_ranks=1)
    assert expected[1] == 0.0
    for losses in world.run(losses_around_nothing, accumulation):
        assert losses == pytest.approx(expected, rel=1e-5)


def losses_around_nothing(accumulation: int) -> list[float]:
    model = make_model()
    plan = Plan(training={"steps": STEPS, "gradient_accumulation": accumulation})
    engine = parallelize(model, torch.optim.SGD(model.parameters(), lr=0.05), plan, loss_fn=of_sum)
    batches = make_batches()
    batches[1] = batches[1][0], torch.full_like(batches[1][1], -100)
    return [engine.step(batch) for batch in engine.batches(batches)]


def train_on_nothing() -> None:
    model = make_model()
    engine = parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), Plan(), loss_fn=flat)
    tokens, labels = make_batches()[0]
    engine.step((tokens, torch.full_like(labels, -100)))


def test_a_contrastive_loss_over_gathered_outputs_is_that_of_one_process(world: World) -> None:
    expected = plain(contrast, make_batches())
    for mesh in ({}, {"mesh": {"shard": 2}}):
        for losses in world.run(train, "contrastive", {"training": {"gather_for_loss": True}, **mesh}):
            assert losses == pytest.approx(expected, rel=1e-5)


def evaluate(name: str) -> tuple[float, list[bool]]:
    model = make_model()
    model[1].eval()  # a layer that stays in evaluation mode while the rest trains
    engine = parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), Plan(), loss_fn=LOSSES[name])
    value = engine.evaluate(make_batches())
    return value, [module.training for module in engine.unwrapped.modules()]


@pytest.mark.parametrize("name", ["flat", "selected", "sum and count", "class weights"])
def test_an_evaluation_is_a_mean_over_all_that_counts(world: World, name: str) -> None:
    model = make_model().eval()
    tokens, labels = (torch.cat(parts) for parts in zip(*make_batches(), strict=True))
    with torch.no_grad():
        value = LOSSES[name](model(tokens), labels)
    expected = float(value[0] / value[1] if isinstance(value, tuple) else value)
    for num_ranks in (1, 2, 3):
        for found, modes in world.run(evaluate, name, num_ranks=num_ranks):
            assert found == pytest.approx(expected, rel=1e-5)
            assert modes == [True, True, False, True, True]


class Named(nn.Module):
    """Names what it takes and what it returns, as models of several heads do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"classes": self.inner(tokens)}


def of_named(outputs: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
    """A mean over the labels from 0 on, without a loss of torch's."""
    labels = targets["classes"]
    picked = outputs["classes"].log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    mask = labels >= 0
    return -(picked * mask).sum() / mask.sum()


def train_named(is_plain: bool) -> list[float]:
    model = Named()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    made = make_batches(lonely=False)
    made[0][1].clamp_(min=0)  # all labels of the first batch count
    batches = [({"tokens": tokens}, {"classes": labels}) for tokens, labels in made]
    if not is_plain:
        engine = parallelize(model, optimizer, Plan(), loss_fn=of_named)
        return [engine.step(batch) for batch in engine.batches(batches, epochs=1)]
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = of_named(model(**inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_named_inputs_targets_and_outputs_have_the_losses_of_one_process(world: World) -> None:
    for losses in world.run(train_named, False):
        assert losses == pytest.approx(train_named(True), rel=1e-5)
