"""Offload on several ranks, through the Engine: the losses of one process, and refusals on every rank."""

from __future__ import annotations

import copy
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from tests.bed.world import World
from tests.parallel.offload.models import KB, STEPS, batches, build, config, loss_of, plain
from torsh_distributed.errors import ConfigurationError, IoError, MemoryAllocationFailed, ProcessFailure
from torsh_distributed.parallel.offload import PagedDataParallel, StateOffload
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize

PAGED: dict[str, Any] = {"enabled": True, "gpu_memory_budget_gb": 60 * KB, "cpu_memory_budget_gb": 2000 * KB}
STATE_ONLY: dict[str, Any] = {**PAGED, "params": False, "grads": False}


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def plan_of(offload: dict[str, Any], **sections: Any) -> Plan:
    training = {"steps": STEPS, "batch_size": 4, "gradient_clipping": 0.3, **sections.pop("training", {})}
    return Plan.from_dict({"offload": offload, "training": training, **sections})


def engine_losses(offload: dict[str, Any], sections: dict[str, Any], model: str = "gpt") -> list[float]:
    spread, optimizer = build(model)
    if dist.get_rank() > 0:  # replicas become those of rank 0
        with torch.no_grad():
            for param in spread.parameters():
                param.mul_(1.5)
    whole = "fsdp" not in sections and "mesh" not in sections
    engine = parallelize(
        spread if whole else build(model)[0],
        optimizer if whole else adamw,
        plan_of(offload, **sections),
        loss_fn=cross_entropy,
    )
    losses, state = [], None
    for number, batch in enumerate(engine.batches(list(batches()))):
        losses.append(engine.step(batch))
        if number == 9:
            state = copy.deepcopy(engine.state_dict())  # parameters that stay where they are go on changing
    assert state is not None
    # The second half again, from the state of the first: the same losses.
    engine.load_state_dict(state)
    again = [engine.step(batch) for batch in engine.batches(list(batches()))]
    assert again == pytest.approx(losses[10:], abs=1e-5)
    return losses


def adamw(params: Any) -> torch.optim.Optimizer:
    params = list(params)
    small, large = ([p for p in params if (p.dim() == 1) is is_small] for is_small in (True, False))
    groups = [{"params": large, "weight_decay": 0.1}, {"params": small, "lr": 2e-3, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=4e-3)


ACCUMULATED = {"training": {"gradient_accumulation": 2}}
SHARDED = {"mesh": {"dp": 1, "shard": 2}, "fsdp": {"wrap_classes": ["Block"]}}


@pytest.mark.parametrize(
    ("offload", "sections", "model"),
    [
        pytest.param(PAGED, ACCUMULATED, "tied", id="paged, accumulated, unused"),
        pytest.param(
            {**PAGED, "params": False, "gpu_memory_budget_gb": 200 * KB}, ACCUMULATED, "gpt", id="gradients too"
        ),
        pytest.param(STATE_ONLY, SHARDED, "gpt", id="state under FSDP2"),
        pytest.param(PAGED, {}, "gpt", id="paged", marks=pytest.mark.matrix),
        pytest.param(STATE_ONLY, ACCUMULATED, "gpt", id="state under DDP", marks=pytest.mark.matrix),
        pytest.param(STATE_ONLY, {"precision": {"dtype": "fp16"}}, "gpt", id="state, fp16", marks=pytest.mark.matrix),
    ],
)
def test_two_ranks_reach_the_losses_of_one_process(
    world: World, offload: dict[str, Any], sections: dict[str, Any], model: str
) -> None:
    expected = plain(model, clip=0.3)
    for losses in world.run(engine_losses, offload, sections, model, timeout_s=60):
        assert losses == pytest.approx(expected, abs=0.02 if "precision" in sections else 1e-4)
    assert expected[-1] < expected[0]


def fsdp_with_params_on_the_host() -> tuple[list[float], int]:
    """torch's CPUOffloadPolicy keeps the shards, ours their moments."""
    model, _ = build()
    for block in [*model.blocks, model]:
        fully_shard(block, offload_policy=CPUOffloadPolicy(pin_memory=False))
    given = adamw(model.parameters())
    state_only = config(params=False, grads=False)
    with StateOffload(model, given, state_only) as offload:
        losses = []
        for ids, targets in batches():
            half = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
            loss = loss_of(model, ids[half], targets[half])
            loss.backward()
            offload.optimizer.step()
            offload.optimizer.zero_grad()
            mean = loss.detach() / 2
            dist.all_reduce(mean)
            losses.append(mean.item())
        return losses, offload.stats().stored_bytes


def test_moments_of_shards_on_the_host_are_updated_in_place(world: World) -> None:
    numel = sum(param.numel() for param in build()[0].parameters())
    for losses, stored_bytes in world.run(fsdp_with_params_on_the_host):
        assert losses == pytest.approx(plain(), abs=1e-4)
        assert stored_bytes <= 1.1 * 2 * 4 * numel / 2, "two moments of half the model, no copy of the parameters"


def refusals(folder: str) -> list[str]:
    """What each mistake says on this rank; then one that only rank 1 makes."""
    said = []
    for offload, sections, kind in [
        ({**PAGED, "gpu_memory_budget_gb": 10 * KB}, {}, MemoryAllocationFailed),
        ({**PAGED, "cpu_memory_budget_gb": 60 * KB}, {}, MemoryAllocationFailed),
        ({**PAGED, "grads": False}, SHARDED, ConfigurationError),
        (PAGED, {"precision": {"dtype": "fp16"}}, ConfigurationError),
        ({**STATE_ONLY, "optimizer_state": False, "grads": True}, {}, ConfigurationError),
    ]:
        model, optimizer = build()
        try:
            parallelize(model, optimizer, plan_of(offload, **sections), loss_fn=cross_entropy)
        except kind as error:
            said.append(str(error))
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        PagedDataParallel(build()[0], config(disk_dir=folder, cpu_memory_budget_gb=20 * KB))
    except (IoError, ProcessFailure) as error:
        said.append(f"{type(error).__name__}: {error}")
    return said


def test_refusals_come_on_every_rank_before_the_first_step(world: World, tmp_path: Path) -> None:
    first, second = world.run(refusals, str(tmp_path))
    parts = [
        "too small for blocks",
        "would fit as int8",
        "the gradient of a shard is where the shard is",
        "do not support loss scaling",
        "the update runs where the state is",
    ]
    for said in (first, second):
        for message, part in zip(said, parts, strict=False):
            assert part in message
    assert first[-1].startswith("ProcessFailure: rank 1 could not offload the model: the disk under")
    assert second[-1].startswith("IoError: the disk under")
    assert list(tmp_path.iterdir()) == []


class Penalised(nn.Module):
    """Its loss has the gradient of an input: a backward inside forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            rows = rows.clone().requires_grad_()
            outputs = self.layers(rows)
            (slopes,) = torch.autograd.grad(outputs.sum(), rows, create_graph=True)
        return nn.functional.cross_entropy(outputs, labels) + (slopes.norm(dim=1) - 1).square().mean()


def penalised_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(8, 6, generator=generator), torch.arange(8) % 3) for _ in range(5)]


def penalised_losses() -> list[float]:
    model = Penalised()
    plan = Plan(offload=PAGED, training={"steps": 5, "batch_size": 8})
    engine = parallelize(model, torch.optim.AdamW(model.parameters(), lr=0.02), plan)
    return [engine.step(batch) for batch in engine.batches(penalised_batches())]


@pytest.mark.ranks
def test_a_backward_inside_forward_ends_no_step(world: World) -> None:
    model, expected = Penalised(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for batch in penalised_batches():
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for losses in world.run(penalised_losses):
        assert losses == pytest.approx(expected, rel=1e-4)
