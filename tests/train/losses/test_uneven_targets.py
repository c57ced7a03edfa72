"""Losses that leave parts of the targets out, though nothing of the first batch is left out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.bed.world import World
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize
from torsh_distributed.train.losses.loss_kind import MeanOfLabels, MeanOfSamples, MeanOfValues
from torsh_distributed.train.losses.uneven_targets import KEPT, of_loss_fn
from torsh_distributed.train.losses.watched_loss import WatchedLoss

STEPS, ROWS, LENGTH, CLASSES = 4, 8, 6, 5


def by_hand(missing: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A mean over the labels other than `missing`, without a loss of torch's."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        picked = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        mask = (labels != missing).float()
        return -(picked * mask).sum() / mask.sum()

    return loss


def selected(logits: Tensor, labels: Tensor) -> Tensor:
    mask = labels != 0
    return functional.cross_entropy(logits[mask], labels[mask])


def of_rows(logits: Tensor, labels: Tensor) -> Tensor:
    """Every sample weighs the same, however many of its labels count."""
    picked = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    mask = (labels != 0).float()
    return (-(picked * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def masked(logits: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
    wanted, mask = targets
    return functional.mse_loss(logits[..., 0][mask], wanted[mask])


def masked_by_hand(logits: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
    wanted, mask = targets
    return ((logits[..., 0] - wanted).square() * mask).sum() / mask.sum()


def within_lengths(logits: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
    wanted, lengths = targets
    mask = torch.arange(LENGTH, device=lengths.device) < lengths[:, None]
    return ((logits[..., 0] - wanted).square() * mask).sum() / lengths.sum()


def known(logits: Tensor, wanted: Tensor) -> Tensor:
    """A mean over what is not NaN, by hand."""
    mask = ~wanted.isnan()
    return ((logits[..., 0] - wanted.nan_to_num()).square() * mask).sum() / mask.sum().clamp(min=1)


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    """Divided by the labels that count, which another one than -100 does not."""
    each = functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=4, reduction="none")
    return ((1 - (-each).exp()) * each).sum() / (labels != 4).sum()


def told(logits: Tensor, targets: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    wanted, mask = targets
    return ((logits[..., 0] - wanted).square() * mask).sum(), mask.sum()


def weighted(logits: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
    labels, weights = targets
    each = functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(1)
    return (each * weights).sum() / weights.sum()


def with_a_penalty(logits: Tensor, labels: Tensor) -> Tensor:
    """A mean over labels, and one over samples: right as long as all labels count, as in plain classification."""
    return functional.cross_entropy(logits.transpose(1, 2), labels) + 0.01 * logits.square().mean()


def labels_of(tokens: Tensor, counted: Tensor, missing: int) -> Tensor:
    labels = 1 + tokens % (CLASSES - 1)
    return torch.where(counted, labels, missing)


def batches(kind: str) -> list[tuple[Tensor, Any]]:
    """Everything counts in the first batch; in later ones more of the second half of the rows."""
    torch.manual_seed(4)
    made: list[tuple[Tensor, Any]] = []
    for step in range(STEPS):
        tokens = torch.randint(CLASSES, (ROWS, LENGTH))
        lengths = torch.full((ROWS,), LENGTH)
        if step:
            lengths = 1 + torch.arange(ROWS) * step % LENGTH
        if step == STEPS - 1:
            lengths[:2] = 0  # a microbatch in which nothing counts
        counted = torch.arange(LENGTH) < lengths[:, None]
        wanted, weights = torch.randn(ROWS, LENGTH), torch.linspace(1, 1 + step, ROWS) * (lengths > 0)
        holes = counted & (torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % 5 > 1)
        targets = {
            "zero": labels_of(tokens, counted, 0),
            "ignored": labels_of(tokens, counted, -100),
            "mask": (wanted, counted),
            "numbers": (wanted, counted.float()),
            "holes": (wanted, holes),
            "unknown": torch.where(counted, wanted, torch.nan),
            "unknown holes": torch.where(holes, wanted, torch.nan),
            "four": torch.where(counted, tokens % 4, 4),
            "ignored holes": labels_of(tokens, holes, -100),
            "lengths": (wanted, lengths),
            "weights": (labels_of(tokens, counted | True, 0), weights),
        }
        made.append((tokens, targets[kind]))
    return made


CASES: dict[str, tuple[Callable[..., Tensor], str]] = {
    "labels of 0 by hand": (by_hand(0), "zero"),
    "labels of -100 by hand": (by_hand(-100), "ignored"),
    "selected labels": (selected, "zero"),
    "rows": (of_rows, "zero"),
    "selected values": (masked, "mask"),
    "mask by hand": (masked_by_hand, "mask"),
    "mask of numbers": (masked_by_hand, "numbers"),
    "mask with holes": (masked_by_hand, "holes"),
    "lengths": (within_lengths, "lengths"),
    "known": (known, "unknown"),
    "known with holes": (known, "unknown holes"),
    "another ignored label": (focal, "four"),
    "told": (told, "mask"),
    "labels of -100 with holes": (by_hand(-100), "ignored holes"),
    "weights": (weighted, "weights"),
}


def make_model() -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(CLASSES, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    model.register_buffer("cos", torch.zeros(LENGTH, 1))  # what tells positions, without which cp is refused
    return model


class OwnLoss(nn.Module):
    """Computes its loss itself, from a mask in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()

    def forward(self, tokens: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
        wanted, mask = targets
        each = functional.mse_loss(self.inner(tokens)[..., 0], wanted, reduction="none")
        return (each * mask).sum() / mask.sum()


def plain(name: str) -> list[float]:
    """One process and torch alone."""
    loss_fn, kind = CASES[name]
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for tokens, targets in batches(kind):
        optimizer.zero_grad()
        loss = loss_fn(model(tokens), targets)
        loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(name: str, plan: dict[str, Any], *, own: bool = False) -> list[float]:
    loss_fn, kind = CASES[name]
    model = OwnLoss() if own else make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    training = {"steps": STEPS, "batch_size": ROWS, **plan.get("training", {})}
    chosen = Plan(**{**plan, "training": training})
    engine = parallelize(model, optimizer, chosen, loss_fn=None if own else loss_fn)
    return [engine.step(batch) for batch in engine.batches(batches(kind))]


PLANS: tuple[dict[str, Any], ...] = (
    {},
    {"mesh": {"shard": 2}},
    {"training": {"gradient_accumulation": 2}},
    {"mesh": {"pp": 2}, "pipeline": {"num_microbatches": 4}},
    {"mesh": {"pp": 2}, "pipeline": {"num_microbatches": 2}, "training": {"gradient_accumulation": 2}},
)


CONTEXT = {"mesh": {"cp": 2}}
NOT_IN_PARTS = {
    "rows": "let loss_fn return",
    "lengths": "must match the size",
}
"""What parts of sequences cannot compute, and what is said."""


def train_in_parts_of_sequences(names: list[str]) -> dict[str, list[float] | str]:
    found: dict[str, list[float] | str] = {}
    for name in names:
        try:
            found[name] = train(name, CONTEXT)
        except Exception as error:
            found[name] = str(error)
    return found


OF_EACH_KIND = ["labels of -100 by hand", "selected values", "mask with holes", "told", "weights", *NOT_IN_PARTS]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "names", [OF_EACH_KIND, pytest.param([*CASES], marks=pytest.mark.matrix)], ids=["some", "every"]
)
def test_parts_of_sequences_weigh_as_in_one_process(world: World, names: list[str]) -> None:
    for found in world.run(train_in_parts_of_sequences, names):
        for name, losses in found.items():
            if isinstance(losses, str):
                assert NOT_IN_PARTS[name] in losses
            else:
                assert losses == pytest.approx(plain(name), rel=1e-5), name


EVERY = [(name, plan) for name in CASES for plan in range(len(PLANS))]
EVERY += [("own", plan) for plan in range(len(PLANS)) if "pp" not in PLANS[plan].get("mesh", {})]
SOME = [(name, plan) for number, name in enumerate(CASES) for plan in (number % 5, (number + 2) % 5)] + [("own", 2)]
"""Every loss under two plans, and every plan with four losses and more; the matrix has all pairs."""


def train_pairs(pairs: list[tuple[str, int]]) -> list[list[float]]:
    own = {"own": "mask by hand"}
    return [train(own.get(name, name), PLANS[plan], own=name in own) for name, plan in pairs]


@pytest.mark.ranks
@pytest.mark.parametrize("pairs", [SOME, pytest.param(EVERY, marks=pytest.mark.matrix)], ids=["some", "every"])
def test_what_the_first_batch_does_not_leave_out_weighs_as_in_one_process(
    world: World, pairs: list[tuple[str, int]]
) -> None:
    for found in world.run(train_pairs, pairs):
        for (name, plan), losses in zip(pairs, found, strict=True):
            expected = plain("mask by hand" if name == "own" else name)
            assert losses == pytest.approx(expected, rel=1e-5), (name, PLANS[plan])


class Passing(nn.Module):
    """Returns the mask that it is given beside the logits, or one of its own."""

    def __init__(self, *, own_mask: bool) -> None:
        super().__init__()
        self.inner, self.own_mask = make_model(), own_mask

    def forward(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(tokens), tokens >= 0 if self.own_mask else mask


def masked_by_output(outputs: tuple[Tensor, Tensor], wanted: Tensor) -> Tensor:
    logits, mask = outputs
    return masked_by_hand(logits, (wanted, mask))


def train_passing() -> list[float]:
    model = Passing(own_mask=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    engine = parallelize(model, optimizer, Plan(training={"steps": STEPS}), loss_fn=masked_by_output)
    made = [((tokens, mask), wanted) for tokens, (wanted, mask) in batches("mask")]
    return [engine.step(batch) for batch in engine.batches(made)]


def refusals_of_passing() -> list[str]:
    found = []
    for own_mask, plan in ((True, {}), (False, {"mesh": {"pp": 2}, "pipeline": {"num_microbatches": 2}})):
        model = Passing(own_mask=own_mask)
        engine = parallelize(model, partial(torch.optim.SGD, lr=0.3), Plan(**plan), loss_fn=masked_by_output)
        tokens, (wanted, mask) = batches("mask")[0]
        with pytest.raises(ConfigurationError) as refused:
            engine.step(next(iter(engine.batches([((tokens, mask), wanted)]))))
        found.append(refused.value.message)
    return found


@pytest.mark.ranks
def test_a_mask_that_the_model_passes_on_weighs_and_one_of_its_own_is_refused(world: World) -> None:
    for losses in world.run(train_passing):
        assert losses == pytest.approx(plain("mask by hand"), rel=1e-5)
    for own, piped in world.run(refusals_of_passing):
        assert "will not be once masks" in own
        assert "the last stage of a pipeline gets the targets only" in piped


def fits(name: str, kept: Any) -> dict[Any, bool]:
    loss_fn, kind = CASES.get(name, (with_a_penalty, "zero"))
    tokens, targets = batches(kind)[0]
    watched = WatchedLoss(loss_fn)
    watched.watches = True
    return of_loss_fn(watched, make_model()(tokens), targets, kept)


def test_a_kind_that_counts_what_the_loss_counts_is_kept() -> None:
    assert fits("rows", MeanOfSamples())[KEPT]
    assert fits("penalty", MeanOfLabels((1,)))[KEPT]
    assert not fits("mask by hand", MeanOfSamples())[KEPT]
    found = fits("selected values", MeanOfValues((1, 0)))
    assert not found[KEPT]
    assert found["computed", (), 0]


def test_a_first_batch_with_holes_tells_by_its_mask() -> None:
    found = fits("mask with holes", MeanOfSamples())
    assert not found[KEPT]
    assert found["weights", (1, 1), 0]


def drawing(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.dropout(logits).square().mean()


def test_a_loss_that_draws_random_numbers_is_not_judged() -> None:
    tokens, targets = batches("zero")[0]
    watched = WatchedLoss(drawing)
    watched.watches = True
    assert of_loss_fn(watched, make_model()(tokens), targets, MeanOfSamples()) == {}


def test_targets_without_rows_are_left_alone() -> None:
    watched = WatchedLoss(selected)
    watched.watches = True
    assert of_loss_fn(watched, torch.randn(3, 2), torch.zeros(4, dtype=torch.long), MeanOfSamples()) == {}


class Normalised:
    """Keeps a running mean of what it computed."""

    def __init__(self) -> None:
        self.mean: Tensor | None = None

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = functional.mse_loss(outputs, targets)
        self.mean = loss.detach() if self.mean is None else 0.9 * self.mean + 0.1 * loss.detach()
        return loss / self.mean


def test_looking_at_a_loss_leaves_its_running_means() -> None:
    loss_fn = Normalised()
    watched = WatchedLoss(loss_fn)
    with watched.untouched():
        watched(torch.ones(2), torch.zeros(2))
        assert watched.seen is not None
    assert watched.seen is None
    assert watched.loss_fn is loss_fn
    assert loss_fn.mean is None
