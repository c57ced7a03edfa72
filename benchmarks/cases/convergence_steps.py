"""Steps until a loss is reached: by the Engine, and by a loop around torch's DDP."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from benchmarks.convergence import TASKS
from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit
from tests.bed.world import World
from torsh_distributed import Plan, TrainingConfig
from torsh_distributed.train import parallelize

_TRAININGS = {
    "classifier": TrainingConfig(steps=900, batch_size=128, learning_rate=0.02),
    "gpt": TrainingConfig(steps=700, batch_size=16, learning_rate=3e-3),
}
_TARGETS = {"classifier": (1.2, 1.0, 0.9), "gpt": (1.2, 0.9, 0.72)}
_WINDOW = 20
_NUM_SEEDS = 5


def _by_engine(task: str, training: TrainingConfig) -> list[float]:
    """The loss of every step; runs on every rank."""
    plan = Plan(training=training)
    demo = TASKS[task](plan)
    engine = parallelize(demo.model, demo.optimizer, plan, loss_fn=demo.loss_fn)
    return [engine.step(batch) for batch in engine.batches(demo.loader)]


def _by_torch(task: str, training: TrainingConfig) -> list[float]:
    """The same with torch alone: the same model, optimizer and data, in the order of torch's own sampler."""
    demo = TASKS[task](Plan(training=training))
    data: Dataset[tuple[torch.Tensor, torch.Tensor]] = demo.loader.dataset
    sampler: DistributedSampler[tuple[torch.Tensor, torch.Tensor]] = DistributedSampler(
        data, seed=training.seed, drop_last=True
    )
    batch_size = training.batch_size // dist.get_world_size()
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler, drop_last=True)
    model, losses = DistributedDataParallel(demo.model), list[float]()
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            if len(losses) == training.steps:
                return losses
            loss = demo.loss_fn(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]  # torch's
            demo.optimizer.step()
            demo.optimizer.zero_grad()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(float(mean) / dist.get_world_size())
    raise AssertionError("epochs do not end")


def _steps_to(losses: list[float], target: float) -> int | None:
    """The first step at which the mean of the last losses is at most the target."""
    for step in range(_WINDOW, len(losses) + 1):
        if statistics.fmean(losses[step - _WINDOW : step]) <= target:
            return step
    return None


def _rows(budget: Budget) -> Iterator[Row | Note]:
    seeds = range(1 if budget.is_quick else _NUM_SEEDS)
    world = World()
    try:
        for task, usual in _TRAININGS.items():
            training = usual.replace(steps=60) if budget.is_quick else usual
            runs = [training.replace(seed=seed) for seed in seeds]
            ours = [world.run(_by_engine, task, run, backend="torsh", timeout_s=600)[0] for run in runs]
            theirs = [world.run(_by_torch, task, run, backend="gloo", timeout_s=600)[0] for run in runs]
            # Of a quick run only what it gets to, which shows that the case works.
            targets = (max(ours[0][-1], theirs[0][-1]) * 1.2,) if budget.is_quick else _TARGETS[task]
            for target in targets:
                yield from _row(task, target, ours, theirs)
    finally:
        world.close()


def _row(task: str, target: float, ours: list[list[float]], theirs: list[list[float]]) -> Iterator[Row | Note]:
    counts = [[_steps_to(losses, target) for losses in runs] for runs in (ours, theirs)]
    name = f"{task}, to a loss of {target:.2f}"
    reached = [[float(count) for count in side if count is not None] for side in counts]
    if any(len(found) < len(side) for found, side in zip(reached, counts, strict=True)):
        yield Note(
            text=f"{name}: reached in {len(reached[0])} of {len(ours)} runs by ours, {len(reached[1])} by torch."
        )
        return
    mine, torchs = (Measurement.of(found) for found in reached)
    yield Row(name=name, unit=Unit.COUNT, ours=mine, rivals={"torch DDP": torchs})


CASE = Case(
    title="Convergence: steps to a loss",
    about="""Steps until the mean loss of the last 20 is at most the target, medians of five seeds, two ranks, constant
    learning rate. Ours is the Engine with its own order of samples; torch's is a loop around
    DistributedDataParallel with DistributedSampler on gloo. Both begin with the same weights and take the same number
    of samples in a step. The tasks are those of convergence under compression.""",
    rows=_rows,
)
