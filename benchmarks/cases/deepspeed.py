"""ZeRO's stages on the CPU: a step of the Engine, and of a script on the stand-in, against a step of DeepSpeed."""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit
from tests.bed.world import ROOT, World
from torsh_distributed.plan import Plan
from torsh_distributed.train import CpuAdam, parallelize

WIDTH, DEPTH, BATCH, NUM_RANKS = 1024, 8, 8, 2
STAGES = {0: "replicas", 1: "shard_optimizer", 2: "shard_grad_op", 3: "full_shard"}
PLACE = ROOT / "build" / "deepspeed"
HOW = "DS_BUILD_OPS=0 pip install --no-build-isolation --no-deps --target build/deepspeed -r benchmarks/deepspeed.txt"
Step = Callable[[Tensor, Tensor], float]


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))


def _batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs = torch.randn(BATCH, WIDTH, generator=generator)
    return inputs, inputs.roll(1, dims=1)


def _measured(step: Step, num_steps: int) -> tuple[float, float]:
    """Median seconds of a step on the slowest rank, and the mean loss of the last one; runs on every rank."""
    inputs, targets = _batch()
    times, loss = [], 0.0
    for _ in range(num_steps + 3):
        dist.barrier()
        started = time.perf_counter()
        loss = step(inputs, targets)
        times.append(time.perf_counter() - started)
    slowest = torch.tensor(statistics.median(times[3:]), dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    mean = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(mean)
    return float(slowest), float(mean) / dist.get_world_size()


def _ours(stage: int, num_steps: int) -> tuple[float, float]:
    sections: dict[str, dict[str, object]] = {"mesh": {"dp": 1, "shard": -1} if stage else {"dp": -1}}
    if stage:
        sections["fsdp"] = {"strategy": STAGES[stage]}
    model = _model()
    optimizer = CpuAdam(model.parameters(), lr=1e-3)
    engine = parallelize(model, optimizer, Plan.from_dict(sections), loss_fn=functional.mse_loss)
    return _measured(lambda inputs, targets: engine.step((inputs, targets)), num_steps)


def use_deepspeed(place: Path) -> None:
    """Make DeepSpeed importable in this process, with ninja for the parts it builds on first use."""
    sys.path.append(str(place))
    os.environ["PATH"] = f"{place / 'bin'}:{os.environ['PATH']}"


def build_deepspeed(place: Path) -> None:
    """Compile its parts, which takes minutes, before anything is timed. An interrupted build leaves a lock."""
    for lock in (place / "extensions").glob("*/lock"):
        lock.unlink()
    use_deepspeed(place)
    from deepspeed.comm.torch import build_shm_op
    from deepspeed.ops.op_builder import CPUAdamBuilder

    build_shm_op()
    CPUAdamBuilder().load()


def _theirs(stage: int, num_steps: int, place: Path) -> tuple[float, float]:
    use_deepspeed(place)
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return _scripted(deepspeed, DeepSpeedCPUAdam, stage, num_steps)


def _stand_in(stage: int, num_steps: int) -> tuple[float, float]:
    from torsh_distributed.migrate import deepspeed
    from torsh_distributed.migrate.deepspeed.ops import DeepSpeedCPUAdam

    return _scripted(deepspeed, DeepSpeedCPUAdam, stage, num_steps)


def _scripted(deepspeed: Any, adam: Any, stage: int, num_steps: int) -> tuple[float, float]:
    """The same lines through DeepSpeed or what stands in for it."""
    model = _model()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=adam(model.parameters(), lr=1e-3, adamw_mode=False),
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage},
        },
    )

    def step(inputs: Tensor, targets: Tensor) -> float:
        loss = functional.mse_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return _measured(step, num_steps)


def _rows(budget: Budget) -> Iterator[Row | Note]:
    if not (PLACE / "deepspeed").is_dir():
        yield Note(text=f"DeepSpeed is not installed, so nothing is measured. To install it: `{HOW}`.")
        return
    rounds, num_steps = (1, 3) if budget.is_quick else (5, 30)
    env = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(PLACE / "extensions")}
    world = World()
    try:
        world.run(build_deepspeed, PLACE, num_ranks=1, backend=None, env=env, timeout_s=1800)
        for stage, name in STAGES.items():
            ours, theirs, scripted = [], [], []
            for _ in range(rounds):
                ours.append(world.run(_ours, stage, num_steps, num_ranks=NUM_RANKS, backend="torsh", timeout_s=120)[0])
                scripted.append(
                    world.run(_stand_in, stage, num_steps, num_ranks=NUM_RANKS, backend="torsh", timeout_s=120)[0]
                )
                arguments = (stage, num_steps, PLACE)
                theirs.append(
                    world.run(_theirs, *arguments, num_ranks=NUM_RANKS, backend=None, env=env, timeout_s=580)[0]
                )
            for side in (ours, scripted):
                _require_same_training(side[0][1], theirs[0][1], stage)
            rates = {
                "DeepSpeed": Measurement.of([1 / seconds for seconds, _ in theirs]),
                "our Engine": Measurement.of([1 / seconds for seconds, _ in ours]),
            }
            yield Row(
                name=f"stage {stage} ({name}), {NUM_RANKS} ranks",
                unit=Unit.PER_SECOND,
                ours=rates["our Engine"],
                rivals={"DeepSpeed": rates["DeepSpeed"]},
            )
            yield Row(
                name=f"stage {stage}, DeepSpeed's script through the stand-in",
                unit=Unit.PER_SECOND,
                ours=Measurement.of([1 / seconds for seconds, _ in scripted]),
                rivals=rates,
            )
    finally:
        world.close()


def _require_same_training(ours: float, theirs: float, stage: int) -> None:
    if not math.isclose(ours, theirs, rel_tol=1e-3):
        raise AssertionError(f"stage {stage}: the last loss is {ours} through us, {theirs} through DeepSpeed")


CASE = Case(
    title="ZeRO's stages, against DeepSpeed",
    about="""8 × Linear 1024 (8.4 M parameters), batch 8 on each of two ranks, one thread each, fp32, Adam, no clipping:
    steps per second of the slower rank, in turns, with the same losses from both. Ours is the Engine on torsh with
    CpuAdam, whose update the replicas of stage 0 divide among them. DeepSpeed runs as its CPU accelerator does on one
    node: on gloo, with its own compiled Adam and its shared-memory operation built (which is for inference only).""",
    rows=_rows,
)
