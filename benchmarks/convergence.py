"""Loss curves of a model with each compression of its gradients; shared by the cases `convergence_*`."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness import Budget, Measurement, Note, Row, Unit
from tests.bed.world import World
from torsh_distributed import CompressConfig, Plan, TrainingConfig
from torsh_distributed.train import parallelize
from torsh_distributed.train.demos import Demo
from torsh_distributed.train.demos.gpt import CharGPT, Windows, next_character_loss

WAYS = {
    "none": CompressConfig(),
    "int8": CompressConfig(method="int8"),
    "natural": CompressConfig(method="natural"),
    "powersgd:4": CompressConfig(method="powersgd:4", error_feedback_momentum=1.0),
    "topk:0.01": CompressConfig(method="topk:0.01", error_feedback_momentum=1.0),
    "topk:0.1, ef21": CompressConfig(method="topk:0.1", error_feedback="ef21", ef21_momentum=0.5),
}
"""What each curve is trained with."""
_NUM_POINTS = 10
_NUM_CHARACTERS = 6


def classifier(plan: Plan) -> Demo:
    """An MLP that learns from a noisy teacher: the labels are drawn at random, so no model reaches a loss of zero."""
    generator = torch.Generator().manual_seed(plan.training.seed)
    points = torch.randn(200_000, 32, generator=generator)
    logits = torch.tanh(points @ torch.randn(32, 64, generator=generator) / 4) @ torch.randn(
        64, 10, generator=generator
    )
    labels = torch.multinomial(torch.softmax(logits, dim=1), 1, generator=generator).squeeze(1)
    torch.manual_seed(plan.training.seed)
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    return Demo(
        name="classifier",
        description="MLP with a noisy teacher",
        model=model,
        loader=DataLoader(TensorDataset(points, labels), batch_size=plan.training.batch_size, shuffle=True),
        loss_fn=nn.functional.cross_entropy,
        optimizer=torch.optim.SGD(model.parameters(), lr=plan.training.learning_rate, momentum=0.9),
    )


def chain_of_characters(length: int, seed: int) -> Tensor:
    """Synthetic text: the last two characters determine the probability of each of six next ones.

    Such text has a lowest possible loss. A few sonnets have none: a GPT learns them by heart, and training that is a
    little behind at every step is still behind at the end.
    """
    generator = torch.Generator().manual_seed(seed)
    table = torch.rand(_NUM_CHARACTERS**2, _NUM_CHARACTERS, generator=generator).pow(8)
    limits = (table / table.sum(1, keepdim=True)).cumsum(1).tolist()
    ids, state = [], 0
    for draw in torch.rand(length, generator=generator).tolist():
        character = min(bisect(limits[state], draw), _NUM_CHARACTERS - 1)
        ids.append(character)
        state = (state * _NUM_CHARACTERS + character) % _NUM_CHARACTERS**2
    return torch.tensor(ids)


def chain_gpt(plan: Plan) -> Demo:
    """A character GPT on text drawn from a Markov chain."""
    text = chain_of_characters(200_000, plan.training.seed)
    torch.manual_seed(plan.training.seed)
    model = CharGPT(_NUM_CHARACTERS, width=32, num_layers=2, num_heads=2)
    return Demo(
        name="chain",
        description="character GPT on text from a chain",
        model=model,
        loader=DataLoader(Windows(text), batch_size=plan.training.batch_size, shuffle=True, drop_last=True),
        loss_fn=next_character_loss,
        optimizer=torch.optim.AdamW(model.parameters(), lr=plan.training.learning_rate),
    )


TASKS: dict[str, Callable[[Plan], Demo]] = {"gpt": chain_gpt, "classifier": classifier}


def losses(task: str, way: str, training: TrainingConfig) -> list[float]:
    """The loss of every step; runs on every rank."""
    compress = WAYS[way].replace(warmup_steps=training.steps // 10, skip_below_numel=256)
    plan = Plan(training=training, compress=compress)
    demo = TASKS[task](plan)
    engine = parallelize(
        demo.model,
        demo.optimizer,
        plan,
        loss_fn=demo.loss_fn,
        scheduler_fn=lambda optimizer: CosineAnnealingLR(optimizer, training.steps),
    )
    return [engine.step(batch) for batch in engine.batches(demo.loader)]


def curves(task: str, training: TrainingConfig, budget: Budget) -> Iterator[Row | Note]:
    """A row for each tenth of the training: the mean loss in it, uncompressed and with each compression."""
    if budget.is_quick:
        training = training.replace(steps=20)
    world = World()
    try:
        found = {
            way: world.run(losses, task, way, training, num_ranks=2, backend="shm", timeout_s=600)[0]
            for way in (("none", "int8") if budget.is_quick else WAYS)
        }
    finally:
        world.close()
    width = training.steps // _NUM_POINTS
    for start in range(0, training.steps, width):
        part = {way: Measurement.of([_mean(all_losses[start : start + width])]) for way, all_losses in found.items()}
        exact = part.pop("none")
        yield Row(name=f"step {start + width}", unit=Unit.LOSS, ours=exact, rivals=part, x=start + width)
    last = {way: _mean(all_losses[-width:]) for way, all_losses in found.items()}
    for way, loss in last.items():
        if way != "none":
            yield Note(
                text=f"{way}: {loss / last['none'] - 1:+.2%} of the uncompressed loss over the last {width} steps."
            )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


ABOUT = """ Two ranks; the learning rate falls to zero along a cosine; the first tenth of the steps is uncompressed
(warm-up), the rest uses error feedback. torsh trains without compression, the others compress; a value is the mean loss
of a tenth of the steps, its ratio that loss over the uncompressed one."""
