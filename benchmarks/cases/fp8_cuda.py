"""fp8 against bf16 on a GPU: speed, memory, and the losses of 200 steps."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from benchmarks.cases.speed_cuda import LARGE, LAYERS, engine_step
from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit
from tests.bed.world import World
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize

_BF16 = "bf16"
_PRECISIONS: dict[str, dict[str, Any]] = {
    _BF16: {"dtype": "bf16"},
    "tensorwise": {"dtype": "fp8"},
    "tensorwise, fast sums": {"dtype": "fp8", "fp8_fast_accumulation": True},
    "rowwise": {"dtype": "fp8", "fp8_recipe": "rowwise"},
}
_NUM_IDS = 256


def _speeds(num_rounds: int, num_steps: int) -> dict[str, tuple[list[float], int]]:
    """Tokens per second in turns, and peak bytes, by precision; all in one process."""
    steps, peaks = {}, {}
    for name, precision in _PRECISIONS.items():
        gc.collect()
        before = torch.cuda.memory_allocated()
        steps[name] = engine_step(LARGE, {**LAYERS, "precision": precision})
        for number in range(6):
            if number == 4:
                torch.cuda.reset_peak_memory_stats()
            steps[name]()
        torch.cuda.synchronize()
        peaks[name] = torch.cuda.max_memory_allocated() - before
    found: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(num_rounds):
        for name in sorted(steps, reverse=bool(number % 2)):
            steps[name]()
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(num_steps):
                steps[name]()
            torch.cuda.synchronize()
            found[name].append(num_steps * LARGE.num_tokens / (time.perf_counter() - started))
    return {name: (speeds, peaks[name]) for name, speeds in found.items()}


def _losses(precision: Mapping[str, Any], num_steps: int) -> list[float]:
    """Losses on text over few ids, where each is one of sixteen after the one before: it ends near log 16."""
    plan = Plan.from_dict(
        {
            "precision": dict(precision),
            "compile": LAYERS["compile"],
            "training": {"fused_loss": True, "gradient_clipping": 1.0, "warmup_steps": 20, "steps": num_steps + 1},
        }
    )
    model = LARGE.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, betas=(0.9, 0.95), fused=True)
    engine = parallelize(model, optimizer, plan)
    generator = torch.Generator("cuda").manual_seed(1)
    found = []
    for _ in itertools.repeat(None, num_steps):
        shape = (LARGE.batch_size, LARGE.length + 1)
        ids = torch.randint(1, 17, shape, generator=generator, device="cuda").cumsum(-1) * 37 % _NUM_IDS
        found.append(engine.step((ids[:, :-1].contiguous(), ids[:, 1:].contiguous())))
    return found


def _rows(budget: Budget) -> Iterator[Row | Note]:
    if not torch.cuda.is_available():
        yield Note(text="Not measured here: there is no CUDA device.")
        return
    num_rounds, num_steps, num_losses = (1, 2, 10) if budget.is_quick else (5, 6, 200)
    world = World()
    try:
        found = world.run(_speeds, num_rounds, num_steps, num_ranks=1, backend="nccl", timeout_s=200)[0]
        for place, (what, unit) in enumerate((("tokens per second", Unit.PER_SECOND), ("peak memory", Unit.BYTES))):
            measured = {name: Measurement.of(one[0] if place == 0 else [float(one[1])]) for name, one in found.items()}
            for name in measured:
                if name != _BF16:
                    yield Row(name=f"{name}: {what}", unit=unit, ours=measured[name], rivals={_BF16: measured[_BF16]})
        compared = (_BF16, "tensorwise, fast sums")
        curves = {
            name: world.run(_losses, _PRECISIONS[name], num_losses, num_ranks=1, backend="nccl", timeout_s=120)[0]
            for name in compared
        }
        last = {name: statistics.fmean(curve[-10:]) for name, curve in curves.items()}
        yield Row(
            name=f"{compared[1]}: mean loss of the last 10 of {num_losses} steps",
            unit=Unit.LOSS,
            ours=Measurement.of([last[compared[1]]]),
            rivals={_BF16: Measurement.of([last[_BF16]])},
        )
        for number in (num_losses // 4, num_losses // 2):
            at = {name: statistics.fmean(curve[number - 10 : number]) for name, curve in curves.items()}
            yield Note(text=f"Loss at step {number}: {', '.join(f'{name} {loss:.4f}' for name, loss in at.items())}.")
    finally:
        world.close()


CASE = Case(
    title="fp8 against bf16 on a GPU",
    about="""The GPT of 0.9 B parameters (width 2048, 16 layers, batches of 8 × 2048) with compiled layers and the fused
    loss, linear layers in fp8 or bf16, all through the Engine with fused AdamW and clipping, in turns in one process.
    Then 200 steps from the same start on text that can be learned.""",
    rows=_rows,
)
