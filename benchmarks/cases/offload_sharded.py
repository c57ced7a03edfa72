"""ZeRO-3 with parameters, gradients and Adam in host memory, on CPU ranks: ours beside DeepSpeed, and ours on disk."""

from __future__ import annotations

import gc
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.cases.deepspeed import HOW, PLACE, Step, build_deepspeed, use_deepspeed
from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit
from benchmarks.process_usage import peak_bytes
from tests.bed.world import World
from torsh_distributed.plan import Plan
from torsh_distributed.train import CpuAdam, parallelize

_NUM_RANKS, _BATCH = 2, 8
_GB = 2**30


class _Size(NamedTuple):
    width: int
    depth: int

    @property
    def layer_numel(self) -> int:
        return self.width**2 + self.width

    @property
    def state_bytes(self) -> int:
        """Of one rank: its shards of the parameters, their gradients and Adam's moments, in fp32."""
        return 16 * self.depth * self.layer_numel // _NUM_RANKS


_LARGE, _SMALL = _Size(2048, 8), _Size(128, 4)
_GATHERED = 4
"""Layers that may be whole at one time: for both the same."""


class _Run(NamedTuple):
    steps_per_s: float
    loss: float
    peak_bytes: int


def _model(size: _Size) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(size.width, size.width) for _ in range(size.depth)))


def _resident_bytes() -> int:
    """Now; and the most so far is forgotten."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes(os.getpid())


def _measured(step: Step, size: _Size, num_steps: int, before_bytes: int) -> _Run:
    """Steps of the slowest rank, the mean loss of the last, and what the rank with most memory took; on every rank."""
    inputs = torch.randn(_BATCH, size.width, generator=torch.Generator().manual_seed(dist.get_rank()))
    targets, times, loss = inputs.roll(1, dims=1), [], 0.0
    for _ in range(num_steps + 3):
        dist.barrier()
        started = time.perf_counter()
        loss = step(inputs, targets)
        times.append(time.perf_counter() - started)
    most = torch.tensor([statistics.median(times[3:]), peak_bytes(os.getpid()) - before_bytes], dtype=torch.float64)
    mean = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    dist.all_reduce(mean)
    return _Run(1 / float(most[0]), float(mean) / dist.get_world_size(), int(most[1]))


def _ours(size: _Size, num_steps: int, host_bytes: int, disk: str | None) -> _Run:
    offload: dict[str, object] = {
        "enabled": True,
        "gpu_memory_budget_gb": 4 * (_GATHERED + 1) * size.layer_numel / _GB,  # and the gradients of one of them
        "cpu_memory_budget_gb": host_bytes / _GB,
    }
    if disk is not None:
        offload["disk_dir"] = disk
    plan = Plan.from_dict({"mesh": {"dp": 1, "shard": -1}, "offload": offload})
    before = _resident_bytes()
    model = _model(size)
    engine = parallelize(model, CpuAdam(model.parameters(), lr=1e-3), plan, loss_fn=functional.mse_loss)
    del model
    return _measured(lambda inputs, targets: engine.step((inputs, targets)), size, num_steps, before)


def _theirs(size: _Size, num_steps: int, place: Path) -> _Run:
    use_deepspeed(place)
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    before = _resident_bytes()
    model = _model(size)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=DeepSpeedCPUAdam(model.parameters(), lr=1e-3, adamw_mode=False),
        config={
            "train_micro_batch_size_per_gpu": _BATCH,
            "gradient_clipping": 0.0,
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "cpu"},
                "offload_optimizer": {"device": "cpu"},
                "stage3_max_live_parameters": _GATHERED * size.layer_numel,
                "stage3_prefetch_bucket_size": size.layer_numel,
                "reduce_bucket_size": size.layer_numel,
                "stage3_param_persistence_threshold": 0,
            },
        },
    )

    def step(inputs: Tensor, targets: Tensor) -> float:
        loss = functional.mse_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return _measured(step, size, num_steps, before)


def _rows(budget: Budget) -> Iterator[Row | Note]:
    if not (PLACE / "deepspeed").is_dir():
        yield Note(text=f"DeepSpeed is not installed, so nothing is measured. To install it: `{HOW}`.")
        return
    size, rounds, num_steps = (_SMALL, 1, 3) if budget.is_quick else (_LARGE, 5, 15)
    env = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(PLACE / "extensions")}
    all_of_it, third = round(1.1 * size.state_bytes), size.state_bytes // 3
    found: dict[str, list[_Run]] = {"ours": [], "DeepSpeed": [], "on disk": []}
    world = World()
    try:
        world.run(build_deepspeed, PLACE, num_ranks=1, backend=None, env=env, timeout_s=1800)
        with tempfile.TemporaryDirectory() as disk:
            for _ in range(rounds):
                ours = {"num_ranks": _NUM_RANKS, "backend": "torsh", "timeout_s": 200}
                found["ours"].append(world.run(_ours, size, num_steps, all_of_it, None, **ours)[0])
                found["on disk"].append(world.run(_ours, size, num_steps, third, disk, **ours)[0])
                theirs = {"num_ranks": _NUM_RANKS, "backend": None, "env": env, "timeout_s": 580}
                found["DeepSpeed"].append(world.run(_theirs, size, num_steps, PLACE, **theirs)[0])
    finally:
        world.close()
    losses = {who: runs[0].loss for who, runs in found.items()}
    if not all(math.isclose(loss, losses["DeepSpeed"], rel_tol=1e-3) for loss in losses.values()):
        raise AssertionError(f"the last losses differ: {losses}")
    for name, who in (("in host memory", "ours"), ("a third in host memory, the rest in files", "on disk")):
        yield Row(
            name=f"steps/s, {name}",
            unit=Unit.PER_SECOND,
            ours=Measurement.of([one.steps_per_s for one in found[who]]),
            rivals={"DeepSpeed, in host memory": Measurement.of([one.steps_per_s for one in found["DeepSpeed"]])},
        )
        yield Row(
            name=f"peak memory of a rank, {name}",
            unit=Unit.BYTES,
            ours=Measurement.of([one.peak_bytes for one in found[who]]),
            rivals={"DeepSpeed, in host memory": Measurement.of([one.peak_bytes for one in found["DeepSpeed"]])},
        )
    yield Note(
        text=f"A rank's parameters, gradients and moments are {size.state_bytes / 2**20:.0f} MiB; {_GATHERED} of "
        f"{size.depth} layers of {4 * size.layer_numel / 2**20:.0f} MiB may be whole at one time, for both. Last "
        "losses: " + ", ".join(f"{who} {loss:.5f}" for who, loss in losses.items()) + "."
    )


CASE = Case(
    title="Offload under sharding, against DeepSpeed's ZeRO-3",
    about="""8 × Linear 2048 (33.6 M parameters), batch 8 on each of two CPU ranks, one thread each, fp32, Adam: shards
    of parameters, gradients and moments in host memory. Steps per second of the slower rank, in turns, with the same
    losses, and by how much the rank with most memory grew at most, from before its model was made; pages of mapped
    files count. DeepSpeed's is `offload_param` and `offload_optimizer` to the CPU, with its compiled Adam. It has no
    budget in bytes, and its way to disk needs libaio: the second pair of rows holds ours with two thirds of the state
    in files beside DeepSpeed's in memory.""",
    rows=_rows,
)
