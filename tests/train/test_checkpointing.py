"""Checkpoints of an Engine: saved under one plan, loaded under another, at another world size, bit for bit."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.bed.world import World
from tests.launch.jobs import write_script
from tests.parallel.composed.test_combinations import CLIP, INTERLEAVED, STEPS, engine_of, plan_of, run
from tests.parallel.composed.test_experts import engine_of as expert_engine
from tests.parallel.composed.test_experts import plan_of as expert_plan
from tests.parallel.golden import MODELS
from tests.parallel.reference import train_alone
from torsh_distributed.checkpoint.files.block_hashes import hash_of
from torsh_distributed.errors import TorshError
from torsh_distributed.plan import CheckpointConfig, MeshConfig, Plan, TensorConfig, TrainingConfig
from torsh_distributed.train import CpuAdam, Engine, parallelize

SPLIT = TensorConfig(sequence_parallel=True, loss_parallel=True)
FULL, OPTIMIZER_ONLY = {"strategy": "full_shard"}, {"strategy": "shard_optimizer"}
ON_HOST = {"enabled": True, "params": False, "grads": False, "optimizer_state": True}
PAGED = {"enabled": True, "params": True, "grads": True, "optimizer_state": True}


def digests(engine: Engine) -> dict[str, str]:
    """Of every tensor of model and optimizer, gathered whole by other code than the checkpoint's."""
    whole = engine.strategy.whole_state(engine.optimizer)
    found = dict(whole["model"])
    for name, values in whole["optimizer"]["state"].items():
        found |= {f"{name} {key}": value for key, value in values.items()}
    return {name: digest(value) for name, value in found.items() if isinstance(value, Tensor)}


def digest(value: Tensor) -> str:
    plain = value.detach().cpu().contiguous()
    return f"{plain.dtype} {tuple(plain.shape)} {hash_of(plain.view(-1).view(torch.uint8).numpy().tobytes())}"


def make(kind: str, plan: Plan) -> Engine:
    return expert_engine(plan) if kind == "moe" else engine_of(kind, plan)


def walk(kind: str, folder: str, plans: list[Plan], first: int) -> tuple[list[dict[str, str]], list[float]]:
    """Each plan loads what the one before it saved; returns what each then held, and the losses of the last steps."""
    found = []
    for number, plan in enumerate(plans, first):
        engine = make(kind, plan)
        if number:
            engine.load(f"{folder}/{number - 1}")
            assert engine.num_steps == 2
        else:
            train(kind, engine, 2)
        found.append(digests(engine))
        engine.save(f"{folder}/{number}")
        engine.checkpoints.close()
    losses = [] if kind == "moe" else run(engine, 2, STEPS)
    return found, losses


def train(kind: str, engine: Engine, steps: int) -> None:
    if kind != "moe":
        run(engine, 0, steps)
        return
    for batch in engine.batches(MODELS["moe"][1]):
        engine.step(batch)
        if engine.num_steps == steps:
            return


def check(world: World, kind: str, folder: Path, stages: list[tuple[int, list[Plan]]]) -> None:
    first, known = 0, None
    for num_ranks, plans in stages:
        results = world.run(walk, kind, str(folder), plans, first, num_ranks=num_ranks, backend="torsh", timeout_s=100)
        for found, losses in results:
            for plan, here in zip(plans, found, strict=True):
                known = known or here
                assert here == known, plan.mesh.equation
            if losses:
                expected = train_alone(kind, num_steps=STEPS, clip=CLIP, num_layers=4)[4:]
                assert losses == pytest.approx(expected, abs=1e-4, rel=1e-4)
        first += len(plans)


@pytest.mark.matrix
def test_a_tied_model_goes_through_the_axes_bit_for_bit(world: World, tmp_path: Path) -> None:
    check(
        world,
        "tied",
        tmp_path,
        [
            (2, [plan_of(MeshConfig(tp=2), tensor=SPLIT), plan_of(MeshConfig(pp=2))]),
            (4, [plan_of(MeshConfig(shard=2, tp=2)), plan_of(MeshConfig(dp=2, shard=2), fsdp=FULL)]),
            (1, [plan_of(MeshConfig())]),
        ],
    )


@pytest.mark.matrix
def test_every_axis_loads_what_every_other_saved(world: World, tmp_path: Path) -> None:
    two = [
        plan_of(MeshConfig(tp=2), tensor=SPLIT),
        plan_of(MeshConfig(pp=2), pipeline=INTERLEAVED),
        plan_of(MeshConfig(shard=2)),
        plan_of(MeshConfig(cp=2)),
        plan_of(MeshConfig(shard=2), fsdp=OPTIMIZER_ONLY),
        plan_of(MeshConfig(dp=2)),
        plan_of(MeshConfig(dp=2), offload=PAGED),
    ]
    four = [plan_of(MeshConfig(**mesh)) for mesh in ({"tp": 2, "pp": 2}, {"shard": 2, "pp": 2}, {"dp": 2, "tp": 2})]
    one = [plan_of(MeshConfig())]
    check(world, "tied", tmp_path, [(2, two), (4, four), (2, two[::-1]), (1, one), (4, four[::-1]), (2, two[1:3])])


def test_experts_go_to_other_ranks_bit_for_bit(world: World, tmp_path: Path) -> None:
    check(
        world,
        "moe",
        tmp_path,
        [
            (2, [expert_plan(MeshConfig(ep=2))]),
            (4, [expert_plan(MeshConfig(ep=2, shard=2)), expert_plan(MeshConfig(ep=2, tp=2))]),
            (1, [expert_plan(MeshConfig())]),
        ],
    )


@pytest.mark.matrix
def test_offloaded_tiers_and_shared_updates_bit_for_bit(world: World, tmp_path: Path) -> None:
    check(
        world,
        "gpt",
        tmp_path,
        [
            (2, [plan_of(MeshConfig(dp=2), offload=PAGED), plan_of(MeshConfig(shard=2), fsdp=OPTIMIZER_ONLY)]),
            (1, [plan_of(MeshConfig(), offload=ON_HOST), plan_of(MeshConfig(), offload=PAGED)]),
        ],
    )


def small(folder: str, **section: Any) -> tuple[Engine, DataLoader[Any]]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Dropout(0.3), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    plan = Plan(
        training=TrainingConfig(steps=9, batch_size=8, seed=3),
        compress={"method": "topk:0.3", "warmup_steps": 0, "skip_below_numel": 0},
        checkpoint=CheckpointConfig(dir=folder, **{"enabled": True, "every_steps": 4, **section}),
    )
    generator = torch.Generator().manual_seed(2)
    data = TensorDataset(torch.randn(40, 6, generator=generator), torch.randn(40, 1, generator=generator))
    engine = parallelize(model, CpuAdam(model.parameters(), lr=0.01), plan, loss_fn=torch.nn.functional.mse_loss)
    return engine, DataLoader(data, batch_size=8, shuffle=True)


def interrupted(folder: str, until: int) -> tuple[list[float], int | None]:
    """Dropout, a shuffled epoch of 5 batches, residuals of compression, an update that ranks share."""
    engine, loader = small(folder)
    found = engine.resume()
    losses = []
    for batch in engine.batches(loader):
        losses.append(engine.step(batch))
        if engine.num_steps == until:
            break
    engine.checkpoints.wait()
    return losses, None if found is None else found.step


def test_a_run_that_resumes_in_mid_epoch_is_the_undisturbed_one(world: World, tmp_path: Path) -> None:
    whole = world.run(interrupted, str(tmp_path / "whole"), 9, num_ranks=2, backend="torsh")[0][0]
    first, none = world.run(interrupted, str(tmp_path / "cut"), 7, num_ranks=2, backend="torsh")[0]
    rest, step = world.run(interrupted, str(tmp_path / "cut"), 9, num_ranks=2, backend="torsh")[0]
    assert (none, step) == (None, 4)
    assert first == whole[:7]
    assert rest == whole[4:]


def rounded(folder: str, offload: dict[str, Any]) -> tuple[list[float], list[float], list[bool]]:
    """A bf16 model whose master values are fp32, off the device; losses after a load, and without one."""

    def build() -> Engine:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).bfloat16()
        adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return parallelize(model, adam, Plan.from_dict({"offload": offload}), loss_fn=torch.nn.functional.mse_loss)

    torch.manual_seed(5)
    batches = [(torch.randn(4, 8).bfloat16(), torch.randn(4, 1).bfloat16()) for _ in range(6)]
    engine, other = build(), build()
    for batch in batches[:3]:
        engine.step(batch)
    engine.save(folder)
    other.load(folder)
    names = [held.name for held in engine.strategy.held_state(engine.optimizer).tensors]
    kept = ["optimizer.state.0.weight.master" in names]
    return [engine.step(batch) for batch in batches[3:]], [other.step(batch) for batch in batches[3:]], kept


def test_master_values_that_are_finer_than_the_parameters_come_back(world: World, tmp_path: Path) -> None:
    for number, offload in enumerate((ON_HOST, PAGED)):
        whole, resumed, kept = world.run(rounded, str(tmp_path / str(number)), offload, num_ranks=1, backend="gloo")[0]
        assert kept == [True]
        assert resumed == whole


def refuse_all(folder: str) -> list[str]:
    engine, _ = small(f"{folder}/a")
    engine.save()
    texts = []

    def expect(call: Any, *args: Any, **options: Any) -> None:
        with pytest.raises(TorshError) as caught:
            call(*args, **options)
        texts.append(str(caught.value.message))

    other, _ = small(f"{folder}/a")
    expect(other.resume)  # another job has it
    expect(lambda: next(other.batches([])))
    expect(other.save)
    expect(engine.load, f"{folder}/none")
    Path(f"{folder}/file").write_text("")
    expect(engine.save, f"{folder}/file")
    torch.manual_seed(1)
    model = torch.nn.Linear(6, 1)
    wrong = parallelize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), Plan(), loss_fn=torch.nn.functional.mse_loss
    )
    expect(wrong.load, f"{folder}/a")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:  # its disk is full
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    engine.save(wait=False)
    expect(engine.save)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    engine.save()
    assert engine.load().step == 0
    return texts


def test_every_rank_gets_a_clear_error(world: World, tmp_path: Path) -> None:
    for texts in world.run(refuse_all, str(tmp_path), num_ranks=2, backend="torsh"):
        for text in texts[:3]:
            assert "another job writes to" in text
        assert "there is no checkpoint in" in texts[3]
        assert "it is a file" in texts[4]
        assert "model.weight is not in the checkpoint; the most similar there is" in texts[5]
        assert "model.0.bias is in the checkpoint, but not in the model" in texts[5]
        assert "step 0 was not saved: rank 1:" in texts[6]


RESUMING = """
import torch
import torsh_distributed as td
plan = td.Plan.model_validate({
    "training": {"steps": 9, "batch_size": 4},
    "checkpoint": {"enabled": True, "dir": os.path.join(folder, "checkpoints"), "every_steps": 3},
})
with td.distributed(plan, backend="torsh"):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = td.parallelize(model, optimizer, plan, loss_fn=torch.nn.functional.mse_loss)
    last = 5 if engine.resume() else 3
    while engine.num_steps < last:
        engine.step((torch.ones(4, 4), torch.ones(4, 2)))
    engine.checkpoints.close()
    assert last != 5, "on purpose"
"""


@pytest.mark.ranks
def test_the_verdict_on_a_resumed_job_names_what_it_went_on_from(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torsh_distributed.run", "--nproc-per-node", "1", write_script(tmp_path, RESUMING)]
    first, resumed = (subprocess.run(command, capture_output=True, text=True, timeout=110) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert resumed.returncode == 1
    assert "AssertionError: on purpose" in resumed.stderr
    assert "last step: 5; last checkpoint: step 3" in resumed.stderr
