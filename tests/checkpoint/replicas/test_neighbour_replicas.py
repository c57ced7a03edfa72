"""A killed rank's state comes back from its neighbour's memory, bit for bit, without a disk."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.bed.world import World
from tests.comm.groups.test_abort import start
from tests.parallel.composed.test_combinations import engine_of, plan_of, run
from tests.train.test_checkpointing import OPTIMIZER_ONLY, digests
from torsh_distributed.checkpoint import CheckpointMetadata, NeighbourReplicas, recover
from torsh_distributed.checkpoint.replicas.neighbour_replicas import holders_of, holders_of_lost
from torsh_distributed.checkpoint.run_facts import describe
from torsh_distributed.comm.collectives.moves import barrier
from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.comm.groups import process_group
from torsh_distributed.comm.groups.abort import abort
from torsh_distributed.errors import CheckpointError, TorshError
from torsh_distributed.parallel.state.whole_state import StateParts
from torsh_distributed.plan import CheckpointConfig, MeshConfig, Plan
from torsh_distributed.train import Engine


def keeping(mesh: MeshConfig, folder: str, **sections: Any) -> Plan:
    section = CheckpointConfig(enabled=True, dir=folder, every_steps=1000, replica_every_steps=2)
    return plan_of(mesh, checkpoint=section, **sections)


def lose(engine: Engine, lost: tuple[int, ...]) -> Any:
    """The ranks of `lost` kill themselves; the others form a new world. Returns what is left in memory."""
    assert engine.checkpoints.replicas is not None
    engine.checkpoints.replicas.wait()
    barrier()
    rank = process_group.rank()
    if rank in lost:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(TorshError):
        all_reduce(torch.ones(10), timeout_s=10)
    abort("a rank is lost")
    replicas = engine.checkpoints.abandon("a rank is lost")
    process_group.regroup([one for one in range(process_group.world_size()) if one not in lost])
    return replicas


def lose_one(folder: str, section: dict[str, Any]) -> tuple[bool, int, dict[int, int], int, int]:
    start("gloo")
    engine = engine_of("gpt", keeping(MeshConfig(shard=4), folder, **section))
    run(engine, 0, 2)
    expected = digests(engine)
    one_copy = engine.checkpoints.replicas.num_bytes if engine.checkpoints.replicas is not None else 0
    run(engine, 2, 3)  # goes on: the copy is of step 2
    replicas = lose(engine, (3,))
    found = replicas.where_lost({0, 1, 2})
    smaller = engine_of("gpt", keeping(MeshConfig(dp=3), folder))
    metadata = smaller.checkpoints.restore(recover(replicas))
    barrier()
    replicas.close()
    is_same = digests(smaller) == expected
    smaller.step(next(iter(batches_of_three())))
    smaller.checkpoints.close()
    return is_same, smaller.num_steps, found, metadata.world_size, one_copy


def batches_of_three() -> Any:
    from tests.parallel.reference import batches

    inputs, targets = batches(1)[0]
    return [(inputs[:1], targets[:1])]


@pytest.mark.parametrize(
    "section", [{}, pytest.param({"fsdp": OPTIMIZER_ONLY}, marks=pytest.mark.matrix)], ids=["zero3", "zero1"]
)
def test_a_lost_rank_is_restored_from_its_neighbour(world: World, tmp_path: Path, section: dict[str, Any]) -> None:
    outcomes = world.outcomes(lose_one, str(tmp_path), section, num_ranks=4, backend=None, timeout_s=60)
    assert outcomes[3].exit_code == -signal.SIGKILL
    for outcome in outcomes[:3]:
        assert outcome.is_ok, outcome.trace
        is_same, num_steps, found, world_size, one_copy = outcome.value
        assert is_same
        assert (num_steps, found, world_size) == (3, {3: 0}, 4)
        assert one_copy > 0
    assert not list(tmp_path.glob("step-*"))


def take_three() -> tuple[list[tuple[int, int]], int, int]:
    replicas = NeighbourReplicas()
    buffer = torch.zeros(1000)
    module = torch.nn.Module()
    module.register_buffer(f"of_rank_{dist.get_rank()}", buffer)
    for step in (1, 2, 3):
        buffer.fill_(float(step))
        assert replicas.update(describe({"model": module}), {}, CheckpointMetadata(step=step))
        replicas.wait()
        dist.barrier()
    saved = recover(replicas)
    assert saved.metadata.step == 3
    for rank in range(2):
        found = torch.zeros(1000)
        saved.fill(f"model.of_rank_{rank}", StateParts().layout("", found), found)
        assert found.unique().tolist() == [3.0]
    saved.close()
    dist.barrier()
    own = replicas.shelf.get(dist.get_rank(), 3)
    assert own is not None
    result = replicas.shelf.inventory(), replicas.num_bytes, own.memory.nbytes
    replicas.close()
    return result


def test_a_rank_has_two_snapshots_of_its_own_and_two_of_its_neighbour(world: World) -> None:
    for inventory, num_bytes, one in world.run(take_three):
        assert inventory == [(0, 2), (0, 3), (1, 2), (1, 3)]
        assert num_bytes == 4 * one


def lose_two(folder: str) -> list[str]:
    start("gloo")
    engine = engine_of("gpt", keeping(MeshConfig(shard=4), folder))
    run(engine, 0, 2)
    replicas = lose(engine, (2, 3))
    texts = []
    for call in (lambda: replicas.where_lost({0, 1}), lambda: recover(replicas)):
        with pytest.raises(CheckpointError) as caught:
            call()
        texts.append(caught.value.message)
    replicas.close()
    return texts


@pytest.mark.matrix
def test_a_rank_lost_with_its_neighbour_is_refused_on_every_survivor(world: World, tmp_path: Path) -> None:
    outcomes = world.outcomes(lose_two, str(tmp_path), num_ranks=4, backend=None, timeout_s=60)
    for outcome in outcomes[:2]:
        assert outcome.is_ok, outcome.trace
        assert all("rank 2 is gone from memory: rank 2 and rank 3" in text for text in outcome.value)


def test_the_copy_is_on_the_next_node_at_the_same_place() -> None:
    assert holders_of(["a", "a", "b", "b", "c", "c"]) == [2, 3, 4, 5, 0, 1]
    assert holders_of(["a", "b", "a", "b"]) == [1, 0, 3, 2]
    assert holders_of(["a"] * 4) == [1, 2, 3, 0]


def test_uneven_nodes_leave_no_rank_without_a_copy() -> None:
    nodes = ["a", "a", "a", "b"]
    holders = holders_of(nodes)
    assert all(nodes[rank] != nodes[holder] for rank, holder in enumerate(holders))


def test_a_rank_lost_with_its_neighbour_is_refused() -> None:
    holders = holders_of(["a"] * 4)
    assert holders_of_lost(holders, {0, 1, 3}) == {2: 3}
    assert holders_of_lost(holders, {0, 2}) == {1: 2, 3: 0}
    with pytest.raises(CheckpointError, match="rank 2 is gone from memory: rank 2 and rank 3, which kept its copy"):
        holders_of_lost(holders, {0, 1})
