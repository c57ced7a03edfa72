"""What a step through the Engine costs over the same step in a bare torch loop with DDP."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit
from tests.bed.world import World
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize
from torsh_distributed.train.demos.gpt import CONTEXT, CharGPT, next_character_loss

_VOCABULARY = 65


@dataclass(frozen=True)
class Job:
    """What is trained, and where."""

    name: str
    num_ranks: int
    device: str
    backend: str
    batch_size: int
    width: int
    num_layers: int
    clipping: float | None = 1.0

    @property
    def dtype(self) -> str:
        """bf16 if the hardware has it: many CPUs only emulate it."""
        return "bf16" if self.device == "cuda" else "fp32"

    def model(self) -> nn.Module:
        """A GPT of this size, the same at every call."""
        torch.manual_seed(0)
        return CharGPT(_VOCABULARY, width=self.width, num_layers=self.num_layers, num_heads=self.width // 32).to(
            self.device
        )

    def batch(self) -> tuple[Tensor, Tensor]:
        """Characters, and the ones that follow them."""
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(_VOCABULARY, (self.batch_size, CONTEXT + 1), generator=generator).to(self.device)
        return ids[:, :-1], ids[:, 1:]


def _bare(job: Job) -> Callable[[tuple[Tensor, Tensor]], object]:
    """The handwritten loop: DDP, autocast, clipping, the mean loss over the ranks at every step."""
    model = DistributedDataParallel(job.model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=job.device == "cuda")

    def step(batch: tuple[Tensor, Tensor]) -> float:
        with torch.autocast(job.device, dtype=torch.bfloat16, enabled=job.dtype == "bf16"):
            loss = next_character_loss(model(batch[0]), batch[1])
        loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        if job.clipping is not None:
            nn.utils.clip_grad_norm_(model.parameters(), job.clipping)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        return mean.item()

    return step


def _engine(job: Job) -> Callable[[tuple[Tensor, Tensor]], object]:
    plan = Plan.from_dict({"precision": {"dtype": job.dtype}, "training": {"gradient_clipping": job.clipping}})
    model = job.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=job.device == "cuda")
    return parallelize(model, optimizer, plan, loss_fn=next_character_loss).step


def _step_s(job: Job, num_rounds: int, num_steps: int) -> dict[str, list[float]]:
    """Seconds of a step on the slowest rank, in turns; runs on every rank."""
    contestants = {"engine": _engine(job), "bare": _bare(job)}
    batch = job.batch()
    for step in contestants.values():
        for _ in range(3):
            step(batch)
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(num_rounds):
        # The order alternates, so it is not always the same one that follows the barrier.
        for name in sorted(contestants, reverse=bool(number % 2)):
            times = []
            dist.barrier()
            for _ in range(num_steps):
                started = time.perf_counter()
                contestants[name](batch)
                times.append(time.perf_counter() - started)
            slowest = torch.tensor(statistics.median(times), dtype=torch.float64, device=job.device)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            found[name].append(float(slowest))
    return found


def rows_of(jobs: Iterable[Job], budget: Budget) -> Iterator[Row]:
    """A row for each job: the Engine against the handwritten loop, in turns in the same processes."""
    num_rounds, num_steps = (2, 3) if budget.is_quick else (20, 20)
    world = World()
    try:
        for job in jobs:
            arguments = (job, num_rounds, num_steps)
            found = world.run(_step_s, *arguments, num_ranks=job.num_ranks, backend=job.backend, timeout_s=240)[0]
            yield Row(
                name=job.name,
                unit=Unit.SECONDS,
                ours=Measurement.of(found["engine"]),
                rivals={"bare torch loop": Measurement.of(found["bare"])},
            )
    finally:
        world.close()


def _rows(budget: Budget) -> Iterator[Row | Note]:
    names = {1: "CPU, fp32, 1 rank", 2: "CPU, fp32, 2 ranks"}
    yield from rows_of(
        [
            Job(name, num_ranks, "cpu", "torsh", batch_size=8, width=128, num_layers=3)
            for num_ranks, name in names.items()
        ],
        budget,
    )


CASE = Case(
    title="A step through the Engine",
    about="""A character GPT (the demo's, 0.6 M parameters), batch 8 on each rank, one thread, AdamW, clipping, the mean
    loss over the ranks at every step, one backend for both. The rival is a handwritten loop around torch's
    DDP. Both take turns in the same processes.""",
    rows=_rows,
)
