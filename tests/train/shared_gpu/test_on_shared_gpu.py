"""Every axis with several ranks on one GPU: the losses of one process."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bed.heavy_imports import TRANSFORMERS
from tests.bed.world import World
from tests.parallel.models.zoo import SPECIMENS
from tests.train.shared_gpu.cases import EXACT, PARTS, Case
from torsh_distributed.errors import TorshError
from torsh_distributed.plan import Plan
from torsh_distributed.train import Engine, parallelize

pytestmark = [pytest.mark.ranks, pytest.mark.needs_cuda, pytest.mark.needs_library("transformers")]

SGD = functools.partial(torch.optim.SGD, lr=0.3)
ADAM = functools.partial(torch.optim.AdamW, lr=1e-2)
STEPS = 3


def built(model: str, plan: dict[str, Any], device: str) -> Engine:
    torch.manual_seed(0)
    optimizer = ADAM if "offload" in plan else SGD
    return parallelize(SPECIMENS[model].build().to(device), optimizer, Plan.from_dict(plan))


def trained(engine: Engine, model: str, device: str, seeds: Sequence[int] = range(STEPS)) -> list[float]:
    """Losses of steps on this rank's part of the batches with these seeds."""
    rank, degree = engine.strategy.data_rank, engine.strategy.data_degree
    found = []
    for seed in seeds:
        batch = SPECIMENS[model].batch(torch.Generator().manual_seed(seed))
        found.append(engine.step({key: value[rank::degree].to(device) for key, value in batch.items()}))
    return found


def all_losses(cases: Sequence[Case], device: str) -> list[list[float] | str]:
    """Of every case, one after the other; what was said instead, where a plan is refused."""
    found: list[list[float] | str] = []
    for case in cases:
        try:
            found.append(trained(built(case.model, dict(case.plan), device), case.model, device))
        except TorshError as error:
            found.append(f"{type(error).__name__}: {error}")
        except Exception as error:
            error.add_note(f"in {case.name} of {case.num_ranks} ranks")
            raise
    return found


@functools.cache
def alone(model: str, is_adam: bool, num_steps: int = STEPS) -> list[float]:
    """The losses of one process on the CPU, without any of this."""
    torch.manual_seed(0)
    specimen = SPECIMENS[model]
    one = specimen.build()
    optimizer = (ADAM if is_adam else SGD)(one.parameters())
    found = []
    for seed in range(num_steps):
        loss = one(**specimen.batch(torch.Generator().manual_seed(seed))).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def check(world: World, title: str, num_ranks: int, device: str = "cuda") -> None:
    """All cases of a part for that many ranks; what differs is named."""
    cases = [one for one in PARTS[title].cases if one.num_ranks == num_ranks]
    by_rank = world.run(
        all_losses, cases, device, num_ranks=num_ranks, backend="torsh", timeout_s=110, imports=TRANSFORMERS
    )
    wrong = {}
    for losses in by_rank:
        for case, found in zip(cases, losses, strict=True):
            expected = alone(case.model, "offload" in case.plan)
            pairs = () if isinstance(found, str) else zip(found, expected, strict=True)
            if isinstance(found, str) or not all(math.isclose(*pair, rel_tol=case.within) for pair in pairs):
                wrong[case.name] = (found, expected)
    assert not wrong


WORLDS = [(title, size) for title, part in PARTS.items() for size in sorted({one.num_ranks for one in part.cases})]


@pytest.mark.parametrize(("title", "num_ranks"), WORLDS)
def test_ranks_on_one_gpu_train_as_one_process(world: World, title: str, num_ranks: int) -> None:
    if title == "fp8":
        pytest.importorskip("torchao", reason="torchao is not installed")
    check(world, title, num_ranks)


def saved_and_loaded(folder: str, before: dict[str, Any], after: dict[str, Any], device: str) -> list[float]:
    """Two steps under one plan, a checkpoint, and a third step under another."""
    losses = trained(engine := built("Llama", before, device), "Llama", device, range(2))
    engine.save(folder)
    other = built("Llama", after, device)
    other.load(folder)
    return losses + trained(other, "Llama", device, [2])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"dp": 2}, {"shard": 2}),
        ({"shard": 2}, {"tp": 2}),
        ({"tp": 2}, {"pp": 2}),
        ({"dp": 2, "shard": 2}, {"tp": 2, "pp": 2}),
        ({"pp": 2, "dp": 2}, {"shard": 4}),
    ],
    ids=str,
)
def test_a_checkpoint_continues_under_another_plan(
    world: World, tmp_path: Path, before: dict[str, int], after: dict[str, int]
) -> None:
    plans = [{"mesh": {"dp": 1, **mesh}, "pipeline": {"num_microbatches": 2}} for mesh in (before, after)]
    arguments = (str(tmp_path / "saved"), *plans, "cuda")
    num_ranks = math.prod(before.values())
    for found in world.run(saved_and_loaded, *arguments, num_ranks=num_ranks, backend="torsh", timeout_s=110):
        assert found == pytest.approx(alone("Llama", False), rel=EXACT)
