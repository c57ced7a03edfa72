"""Offloaded shards on real ranks: the losses of plain shards bit for bit, within budgets, from memory and from disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.bed.world import World
from tests.parallel.offload.models import KB, STEPS, batches, build, plain
from tests.parallel.offload.test_ranks import adamw, cross_entropy
from torsh_distributed.errors import MemoryAllocationFailed
from torsh_distributed.parallel.offload import OffloadStats
from torsh_distributed.parallel.offload.shards.shard_offload_strategy import ShardedOffload
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize

HOST: dict[str, Any] = {"enabled": True, "gpu_memory_budget_gb": 90 * KB, "cpu_memory_budget_gb": 2000 * KB}
STATE: dict[str, Any] = {"enabled": True, "params": False, "grads": False}
"""Plain shards with the same update, whose losses offloaded ones must have bit for bit."""


def plan_of(offload: dict[str, Any], shard: int = 2, **sections: Any) -> Plan:
    training = {"steps": STEPS, "batch_size": 4, **sections.pop("training", {})}
    fsdp = {"wrap_classes": ["Block"], **sections.pop("fsdp", {})}
    mesh = {"dp": -1, "shard": shard}
    return Plan.from_dict({"mesh": mesh, "fsdp": fsdp, "offload": offload, "training": training, **sections})


def on_disk(folder: Path, host: float = 8, **changes: Any) -> dict[str, Any]:
    """A host budget (in KB) that holds a fraction of the state; the rest is in files."""
    return {**HOST, "cpu_memory_budget_gb": host * KB, "disk_dir": str(folder), **changes}


def losses_of(
    offload: dict[str, Any], model: str, sections: dict[str, Any]
) -> tuple[list[float], OffloadStats | None, OffloadStats | None, OffloadStats | None]:
    """Losses of training, statistics of this rank after three steps and after all, and the totals of these."""
    engine = parallelize(build(model)[0], adamw, plan_of(offload, **sections), loss_fn=cross_entropy)
    losses, early = [], None
    for batch in engine.batches(list(batches())):
        losses.append(engine.step(batch))
        if len(losses) == 3 and isinstance(engine.strategy, ShardedOffload):
            early = engine.strategy.stats()
    if not isinstance(engine.strategy, ShardedOffload):
        return losses, None, None, None
    stats = engine.strategy.stats()
    totals = stats.over_ranks()
    engine.strategy.close()
    return losses, early, stats, totals


def train_all(offload: dict[str, Any], cases: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    return [(losses_of(STATE, model, sections)[0], *losses_of(offload, model, sections)) for model, sections in cases]


PLAIN = ("gpt", {})
TIED = ("tied", {"fsdp": {"wrap_classes": ["Linear"]}})
"""Rows that do not divide evenly, a frozen layer, a tied one, one that is used twice, and an unused parameter."""
CLIPPED = ("gpt", {"training": {"gradient_clipping": 0.3}})
KEPT_GATHERED = ("gpt", {"fsdp": {"strategy": "shard_grad_op"}})
ACCUMULATED = ("gpt", {"training": {"gradient_accumulation": 2}})
BF16 = ("gpt", {"precision": {"dtype": "bf16"}})
FP16 = ("gpt", {"precision": {"dtype": "fp16", "init_loss_scale": 2.0**40}})
"""The first steps overflow and are skipped."""
RECOMPUTED = ("gpt", {"activation": {"strategy": "uniform", "every_n_layers": 1}})
INT8 = ("gpt", {"compress": {"method": "int8", "skip_below_numel": 0, "warmup_steps": 0}})


HYBRID = ("gpt", {"fsdp": {"strategy": "hybrid_shard"}})

ALL = {
    "plain": PLAIN,
    "tied": TIED,
    "clipped": CLIPPED,
    "accumulated": ACCUMULATED,
    "bf16": BF16,
    "fp16": FP16,
    "recomputed": RECOMPUTED,
    "int8": INT8,
}


def check(results: list[Any], cases: list[tuple[str, dict[str, Any]]]) -> None:
    for rank in results:
        for (expected, losses, _, stats, _), (model, sections) in zip(rank, cases, strict=True):
            if "gradient_accumulation" in sections.get("training", {}):
                assert losses == pytest.approx(expected, abs=1e-5), "shards are added up, not whole gradients"
            else:
                assert losses == expected, sections
            if "precision" not in sections and "compress" not in sections:
                clip = sections.get("training", {}).get("gradient_clipping")
                assert losses == pytest.approx(plain(model, clip=clip), abs=1e-4)
            assert stats.device.peak_bytes <= stats.device.budget_bytes
            assert stats.host.peak_bytes <= stats.host.budget_bytes


def test_shards_from_disk_train_as_plain_shards_bit_for_bit(world: World, tmp_path: Path) -> None:
    cases = [CLIPPED, TIED]
    results = world.run(train_all, on_disk(tmp_path), cases, timeout_s=100)
    check(results, cases)
    (_, _, early, stats, totals), (_, _, _, other, _) = results[0][0], results[1][0]
    numel = sum(param.numel() for param in build()[0].parameters())
    state_bytes = 16 * numel / 2
    assert stats.host.budget_bytes < 0.2 * state_bytes < 0.8 * state_bytes < stats.disk.used_bytes
    assert stats.stored_bytes == pytest.approx(state_bytes, rel=0.05), "parameters, gradients and two moments"
    assert stats.disk_read_bytes > 3 * stats.stored_bytes
    assert stats.disk_written_bytes > 3 * stats.stored_bytes
    assert early.num_misses == stats.num_misses, "from then on pieces are read before they are gathered"
    assert stats.num_hits > early.num_hits
    assert [layer.name for layer in stats.layers] == ["the model itself", "blocks.0", "blocks.1", "blocks.2"]
    for layer in stats.layers:
        assert layer.num_uses >= STEPS
        assert min(layer.wait_s, layer.forward_s, layer.backward_s) > 0
    assert totals.num_ranks == 2
    assert totals.disk_read_bytes == stats.disk_read_bytes + other.disk_read_bytes
    assert totals.disk.budget_bytes == 2 * stats.disk.budget_bytes
    assert totals.layers[1].num_uses == 2 * stats.layers[1].num_uses
    assert totals.slowest_layers[0].wait_s > 0
    assert list(tmp_path.iterdir()) == []


def test_shards_from_host_memory_with_fp32_masters_of_bf16(world: World) -> None:
    results = world.run(train_all, {**HOST, "device_optimizer_ratio": 0.4}, [BF16], timeout_s=60)
    check(results, [BF16])
    stats = results[0][0][3]
    assert stats.disk is None
    assert stats.num_misses == 0
    assert stats.device.used_bytes > 0.2 * stats.host.used_bytes, "a share of the state stays on the device"


@pytest.mark.matrix
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_every_feature_has_the_losses_of_plain_shards(world: World, tmp_path: Path, name: str, tier: str) -> None:
    offload = HOST if tier == "host" else on_disk(tmp_path)
    check(world.run(train_all, offload, [ALL[name]], timeout_s=60), [ALL[name]])


@pytest.mark.matrix
@pytest.mark.parametrize(("case", "num_ranks"), [(KEPT_GATHERED, 2), (HYBRID, 4)])
def test_zero_2_and_replicas_of_shards(
    world: World, tmp_path: Path, case: tuple[str, dict[str, Any]], num_ranks: int
) -> None:
    offload = on_disk(tmp_path, gpu_memory_budget_gb=200 * KB)
    check(world.run(train_all, offload, [case], num_ranks=num_ranks, timeout_s=90), [case])


def train_and_save(offload: dict[str, Any], folder: str, steps: int) -> list[float]:
    """The losses of the steps after the first `steps`, before which it saves."""
    engine = parallelize(build()[0], adamw, plan_of(offload), loss_fn=cross_entropy)
    losses = []
    for number, batch in enumerate(list(batches())):
        if number == steps:
            engine.save(folder)
        losses.append(engine.step(part_of_batch(batch)))
    return losses[steps:]


def part_of_batch(batch: Any) -> Any:
    """This rank's rows."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    return tuple(part.chunk(num_ranks)[rank] for part in batch)


def load_and_train(offload: dict[str, Any], folder: str, steps: int, shard: int) -> list[float]:
    engine = parallelize(build()[0], adamw, plan_of(offload, shard), loss_fn=cross_entropy)
    with torch.no_grad():
        engine.load(folder)
    return [engine.step(part_of_batch(batch)) for batch in list(batches())[steps:]]


def test_checkpoints_of_offloaded_shards_load_into_plain_ones_and_back(world: World, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    saved = world.run(train_and_save, on_disk(disk), str(tmp_path / "offloaded"), 5, num_ranks=2)[0]
    for loaded in world.run(load_and_train, STATE, str(tmp_path / "offloaded"), 5, 4, num_ranks=4, timeout_s=60):
        assert loaded == pytest.approx(saved, abs=1e-5)
    assert saved == pytest.approx(plain()[5:], abs=1e-4)
    back = world.run(load_and_train, on_disk(disk), str(tmp_path / "offloaded"), 5, 2, num_ranks=2)[0]
    assert back == saved, "resumed from disk to disk: bit for bit"


def refusals() -> list[str]:
    said = []
    for offload, sections in [
        ({**HOST, "gpu_memory_budget_gb": 20 * KB}, {}),
        ({**HOST, "gpu_memory_budget_gb": 50 * KB}, {"fsdp": {"strategy": "shard_grad_op"}}),
        ({**HOST, "cpu_memory_budget_gb": 60 * KB}, {}),
    ]:
        try:
            parallelize(build()[0], adamw, plan_of(offload, **sections), loss_fn=cross_entropy)
        except MemoryAllocationFailed as error:
            said.append(str(error))
    return said


def test_what_does_not_fit_is_refused_before_anything_is_sharded(world: World) -> None:
    for device, zero2, host in world.run(refusals):
        assert "the device budget of 20480 bytes is too small" in device
        assert "the largest piece is blocks" in device
        assert 'use fsdp.strategy = "full_shard"' in zero2
        assert "would fit as int8" in host
