"""Sharded training: our wrapper against torch's parts by hand, our backend against gloo, memory against theory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from benchmarks.convergence import classifier
from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit
from tests.bed import needs
from tests.bed.world import World
from tests.lab.network import Lab
from torsh_distributed.parallel.mesh.mesh import Mesh
from torsh_distributed.parallel.sharded.module import FullyShardedDataParallel
from torsh_distributed.parallel.sharded.shared_shards import storage_bytes
from torsh_distributed.plan import CompressConfig, FsdpConfig, MeshConfig, Plan
from torsh_distributed.train import parallelize

WIDTH, DEPTH, BATCH = 1024, 8, 8
STAGES = {0: "DDP", 1: "shard_optimizer", 2: "shard_grad_op", 3: "full_shard"}
Step = Callable[[], object]


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))


def _by_hand(*, reshard: bool = True) -> nn.Module:
    model, mesh = _model(), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    return model


def _step_of(model: nn.Module) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(BATCH, WIDTH)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _in_turns(steps: dict[str, Step], num_steps: int) -> dict[str, float]:
    """Median seconds of each contestant's step on the slowest rank, in turns; runs on every rank."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(num_steps + 3):
        for name, step in steps.items():
            dist.barrier()
            started = time.perf_counter()
            step()
            if number >= 3:
                times[name].append(time.perf_counter() - started)
    found = {}
    for name, taken in times.items():
        slowest = torch.tensor(statistics.median(taken), dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        found[name] = float(slowest)
    return found


def _wrapper_and_parts(num_steps: int) -> dict[str, float]:
    ours = FullyShardedDataParallel(_model(), FsdpConfig(strategy="full_shard"))
    return _in_turns({"ours": _step_of(ours), "by hand": _step_of(_by_hand())}, num_steps)


def _parts(num_steps: int) -> dict[str, float]:
    return _in_turns({"by hand": _step_of(_by_hand())}, num_steps)


def _held_by_ours(stage: int) -> int:
    """Bytes of parameters, gradients and Adam's state on this rank, between two backwards."""
    model = _model()
    mesh = {"dp": 1, "shard": -1} if stage else {"dp": -1}
    sections = {"mesh": mesh, "ddp": {"gradient_as_bucket_view": True}}
    if stage:
        sections["fsdp"] = {"strategy": STAGES[stage]}
    engine = parallelize(model, torch.optim.Adam(model.parameters()), Plan.from_dict(sections))
    engine.strategy.model(torch.randn(BATCH, WIDTH)).square().mean().backward()
    engine.optimizer.step()
    return _held(engine.unwrapped, engine.optimizer)


def _held_by_torch(stage: int) -> int:
    if stage < 2:
        # Imported here because it warns of a deprecation inside torch.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        model: nn.Module = DistributedDataParallel(_model(), gradient_as_bucket_view=True)
        optimizer: Optimizer = (
            ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
            if stage
            else torch.optim.Adam(model.parameters())
        )
    else:
        model = _by_hand(reshard=stage == 3)
        optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(BATCH, WIDTH)).square().mean().backward()
    optimizer.step()
    return _held(model, getattr(optimizer, "optim", optimizer))


def _held(model: nn.Module, optimizer: Optimizer) -> int:
    params = list(model.parameters())
    grads = [param.grad for param in params if param.grad is not None]
    state = [value for one in optimizer.state.values() for value in one.values() if isinstance(value, Tensor)]
    return storage_bytes(params) + storage_bytes(grads) + storage_bytes(state)


def _theory(stage: int, num_ranks: int) -> float:
    """Bytes in theory: fp32 parameters and gradients, Adam's two fp32 moments, each whole or a shard."""
    numel = DEPTH * (WIDTH * WIDTH + WIDTH)
    whole = {0: (1, 1, 1), 1: (1, 1, num_ranks), 2: (num_ranks,) * 3, 3: (num_ranks,) * 3}[stage]
    params, grads, state = whole
    return 4 * numel * (1 / params + 1 / grads + 2 / state)


def _over_a_link(num_steps: int, ranks_per_host: int) -> dict[str, float]:
    """Two nodes: shards over all ranks, plain and encoded; and replicas of shards if a node has two ranks."""
    whole, replicas = MeshConfig(dp=1, shard=2 * ranks_per_host), MeshConfig(dp=2, shard=ranks_per_host)
    int8 = CompressConfig(method="int8", warmup_steps=0)
    kinds = {"full_shard": (whole, "none", None), "full_shard, int8": (whole, "int8", int8)}
    if ranks_per_host > 1:
        kinds |= {"hybrid_shard": (replicas, "none", None), "hybrid_shard, int8": (replicas, "none", int8)}
    steps = {}
    for name, (mesh, gather, compression) in kinds.items():
        config = FsdpConfig(gather_codec=gather)  # type: ignore[arg-type]  # one of the table above
        steps[name] = _step_of(FullyShardedDataParallel(_model(), config, mesh=Mesh(mesh), compression=compression))
    return _in_turns(steps, num_steps)


def _row(name: str, ours: list[float], rivals: dict[str, list[float]], unit: Unit = Unit.SECONDS) -> Row:
    measured = {rival: Measurement.of(samples) for rival, samples in rivals.items()}
    return Row(name=name, unit=unit, ours=Measurement.of(ours), rivals=measured)


def _step_rows(world: World, rounds: int, num_steps: int) -> Iterator[Row]:
    for num_ranks in (2,) if rounds == 1 else (2, 4):
        found, gloo = [], []
        for _ in range(rounds):
            ran = world.run(_wrapper_and_parts, num_steps, num_ranks=num_ranks, backend="torsh", timeout_s=300)
            found.append(ran[0])
            gloo += [world.run(_parts, num_steps, num_ranks=num_ranks, backend="gloo", timeout_s=300)[0]["by hand"]]
        yield _row(
            f"step, full_shard, {num_ranks} ranks",
            [one["ours"] for one in found],
            {"FSDP2 by hand": [one["by hand"] for one in found], "FSDP2 on gloo": gloo},
        )


def _memory_rows(world: World, stages: Sequence[int], num_ranks: int) -> Iterator[Row]:
    for stage in stages:
        name = STAGES[stage]
        ours = world.run(_held_by_ours, stage, num_ranks=num_ranks, backend="torsh", timeout_s=120)
        torchs = world.run(_held_by_torch, stage, num_ranks=num_ranks, backend="gloo", timeout_s=120)
        rivals = {"theory": [_theory(stage, num_ranks)], "torch's own": [float(max(torchs))]}
        yield _row(f"memory, stage {stage} ({name}), {num_ranks} ranks", [float(max(ours))], rivals, Unit.BYTES)


def _link_rows(world: World, rounds: int, num_steps: int) -> Iterator[Row | Note]:
    missing = needs.netns()
    if missing:
        yield Note(text=f"Two hosts are not measured here: {missing}.")
        return
    with Lab() as lab:
        first, second = lab.hosts(2)
        for host in (first, second):
            host.limit(1.0)
        for ranks_per_host, kinds in ((1, ["full_shard"]), (2, ["full_shard", "hybrid_shard"])):
            places = [first] * ranks_per_host + [second] * ranks_per_host
            found = [
                world.run(
                    _over_a_link,
                    num_steps,
                    ranks_per_host,
                    num_ranks=len(places),
                    backend="torsh",
                    hosts=places,
                    timeout_s=580,
                )[0]
                for _ in range(rounds)
            ]
            for kind in kinds:
                yield _row(
                    f"step, {kind}, int8, two hosts x {ranks_per_host}, 1 Gbit/s",
                    [one[f"{kind}, int8"] for one in found],
                    {"as they are": [one[kind] for one in found]},
                )


def _final_loss(codec: str, num_steps: int) -> float:
    """The loss of the convergence cases' classifier over the last tenth of its steps; runs on every rank."""
    plan = Plan.from_dict(
        {
            "mesh": {"dp": 1, "shard": 2},
            "fsdp": {"gather_codec": codec},
            "compress": {"method": codec, "warmup_steps": 0},
            "training": {"steps": num_steps, "batch_size": 128, "learning_rate": 0.02},
        }
    )
    demo = classifier(plan)
    engine = parallelize(demo.model, demo.optimizer, plan, loss_fn=demo.loss_fn)
    losses = [engine.step(batch) for batch in engine.batches(demo.loader)]
    return statistics.mean(losses[-num_steps // 10 :])


def _loss_note(world: World, num_steps: int) -> Note:
    plain, encoded = (world.run(_final_loss, codec, num_steps, timeout_s=300)[0] for codec in ("none", "int8"))
    return Note(
        text=f"An MLP classifier after {num_steps} steps over two shards: with parameters and gradients in int8 it ends"
        f" at {encoded / plain - 1:+.2%} of the uncompressed loss."
    )


def _rows(budget: Budget) -> Iterator[Row | Note]:
    rounds, num_steps = (1, 3) if budget.is_quick else (5, 30)
    world = World()
    try:
        yield from _step_rows(world, rounds, num_steps)
        yield from _memory_rows(world, (1,) if budget.is_quick else (0, 1, 2, 3), 2 if budget.is_quick else 4)
        if not budget.is_quick:
            yield from _link_rows(world, 3, 10)
            yield _loss_note(world, 1000)
    finally:
        world.close()


CASE = Case(
    title="Sharded training",
    about="""8 × Linear 1024 (8.4 M parameters), batch 8 on each rank, one thread each. Steps: SGD; our wrapper and
    torch's fully_shard by hand, in turns in the same processes on torsh, and the latter on gloo. Memory: parameters,
    gradients and Adam's state on the fullest rank after a step, counted from the storages; torch's own are DDP,
    ZeroRedundancyOptimizer and fully_shard. Two hosts of one or two ranks, joined by a limited link: plain parameters
    and gradients against int8 (all ranks one shard axis), gradients between replicas of two shards.""",
    rows=_rows,
)
