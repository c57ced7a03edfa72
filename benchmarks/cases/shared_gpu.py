"""Ranks that share one GPU: collectives in its memory, and training with two ranks against one with the same batch."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cases.speed_cuda import SMALL
from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit
from tests.bed.world import World
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize

_SIZES = {"1 KB": 1024, "64 KB": 65536, "1 MB": 2**20, "64 MB": 64 * 2**20}
_TRAINING: dict[str, dict[str, int]] = {"DDP": {"dp": 2}, "FSDP2": {"dp": 1, "shard": 2}}


def _timed(call: Callable[[], object], num_calls: int, num_rounds: int) -> list[float]:
    """Seconds of a call, for each round."""
    found = []
    for _ in range(num_rounds + 1):
        dist.barrier()
        started = time.perf_counter()
        for _ in range(num_calls):
            call()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - started) / num_calls)
    return found[1:]


def _collectives(num_rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    """By size: seconds of an all-reduce, and of a copy on the GPU by this rank alone."""
    found = {}
    for name, num_bytes in _SIZES.items():
        tensor = torch.zeros(num_bytes // 4, device="cuda")
        other = torch.empty_like(tensor)
        torch.cuda.synchronize()
        reduced = _timed(lambda tensor=tensor: dist.all_reduce(tensor), 30, num_rounds)  # type: ignore[misc]
        copied: list[float] = []
        for _ in range(num_rounds):
            dist.barrier()
            if dist.get_rank() == 0:  # the others are at the next barrier
                started = time.perf_counter()
                for _ in range(30):
                    other.copy_(tensor)
                    torch.cuda.synchronize()
                copied.append((time.perf_counter() - started) / 30)
        dist.barrier()
        found[name] = (reduced, copied)
    return found


def _tokens_per_s(mesh: dict[str, int], num_rounds: int, num_steps: int) -> list[float]:
    """Of all ranks together, on the same batches whatever their number."""
    plan: dict[str, Any] = {
        "mesh": mesh,
        "precision": {"dtype": "bf16"},
        "training": {"gradient_clipping": 1.0, "fused_loss": True, "steps": 100_000},
    }
    model = SMALL.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    engine = parallelize(model, optimizer, Plan.from_dict(plan))
    rank, degree = engine.strategy.data_rank, engine.strategy.data_degree
    batches = itertools.cycle([tuple(part[rank::degree] for part in one) for one in SMALL.batches(4)])
    for _ in range(3):
        engine.step(next(batches))
    seconds = _timed(lambda: engine.step(next(batches)), num_steps, num_rounds)
    return [SMALL.num_tokens / taken for taken in seconds]


def _rows(budget: Budget) -> Iterator[Row | Note]:
    if not torch.cuda.is_available():
        yield Note(text="Not measured here: there is no CUDA device.")
        return
    num_rounds, num_steps = (1, 2) if budget.is_quick else (5, 6)
    world = World()
    try:
        for num_ranks in (2, 4):
            found = world.run(_collectives, num_rounds, num_ranks=num_ranks, backend="torsh", timeout_s=120)[0]
            for size, (reduced, copied) in found.items():
                yield Row(
                    name=f"all_reduce of {size}, {num_ranks} ranks",
                    unit=Unit.SECONDS,
                    ours=Measurement.of(reduced),
                    rivals={"one copy on the GPU": Measurement.of(copied)},
                )
        arguments = (num_rounds, num_steps)
        alone = world.run(_tokens_per_s, {"dp": 1}, *arguments, num_ranks=1, backend="torsh", timeout_s=120)[0]
        for name, mesh in _TRAINING.items():
            shared = world.run(_tokens_per_s, mesh, *arguments, num_ranks=2, backend="torsh", timeout_s=120)[0]
            yield Row(
                name=f"GPT 124 M, {name} of two ranks: tokens per second",
                unit=Unit.PER_SECOND,
                ours=Measurement.of(shared),
                rivals={"one rank": Measurement.of(alone)},
            )
    finally:
        world.close()


CASE = Case(
    title="Ranks that share one GPU",
    about="""All-reduces of fp32 tensors by two and four ranks on one GPU, on the torsh backend, against one copy of as
    many bytes on that GPU by a single process. Then a GPT of 124 M parameters in bf16, batches of 32 × 1024 tokens:
    two ranks with half of each batch, replicated and sharded, against one rank with all of it.""",
    rows=_rows,
)
