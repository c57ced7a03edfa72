"""Random programs of collectives, the same on every rank: each step gives what a single process computes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.bed.world import World
from tests.comm.backends.ranks import ALL_DTYPES, CORES, assert_same, data, fold_reference, on_shm, ops_for

KINDS = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "message")


@dataclass(frozen=True)
class Step:
    """One collective of a program; the numbers are reduced to what the world has."""

    kind: str
    dtype: torch.dtype
    numel: int
    is_strided: bool
    is_async: bool
    root: int
    op: int


steps = st.builds(
    Step,
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(ALL_DTYPES),
    numel=st.one_of(st.integers(0, 300), st.integers(10_000, 60_000)),
    is_strided=st.booleans(),
    is_async=st.booleans(),
    root=st.integers(0, 3),
    op=st.integers(0, 20),
)


def placed(tensor: Tensor, *, is_strided: bool) -> Tensor:
    """The values in a tensor of their own, every second element of a larger one if wanted."""
    if not is_strided:
        return tensor.clone()
    wide = torch.zeros(2 * tensor.numel(), dtype=tensor.dtype)
    wide[::2] = tensor
    return wide[::2]


def take(step: Step, number: int) -> None:
    """Do one step and compare with what all ranks' data, known to all, must give."""
    rank, size = dist.get_rank(), dist.get_world_size()
    root = step.root % size
    ops = ops_for(step.dtype)
    op = ops[step.op % len(ops)]
    values = [
        [data((step.numel,), step.dtype, one, seed=100 * number + part) for part in range(size)] for one in range(size)
    ]
    mine = placed(values[rank][0], is_strided=step.is_strided)
    outputs = [placed(torch.zeros_like(values[rank][0]), is_strided=step.is_strided) for _ in range(size)]
    firsts = [row[0] for row in values]
    work: object = None
    if step.kind == "all_reduce":
        work = dist.all_reduce(mine, op, async_op=step.is_async)
    elif step.kind == "reduce":
        work = dist.reduce(mine, root, op, async_op=step.is_async)
    elif step.kind == "broadcast":
        work = dist.broadcast(mine, root, async_op=step.is_async)
    elif step.kind == "all_gather":
        work = dist.all_gather(outputs, mine, async_op=step.is_async)
    elif step.kind == "reduce_scatter":
        work = dist.reduce_scatter(outputs[0], values[rank], op, async_op=step.is_async)
    elif step.kind == "all_to_all":
        work = dist.all_to_all(outputs, values[rank], async_op=step.is_async)
    elif step.kind == "gather":
        work = dist.gather(mine, outputs if rank == root else None, dst=root, async_op=step.is_async)
    else:
        work = dist.isend(mine, (rank + 1) % size, tag=number)
        dist.recv(outputs[0], (rank - 1) % size, tag=number)
    if isinstance(work, dist.Work):
        work.wait()
    what = f"step {number}: {step}, {op}"
    if step.kind in ("all_reduce", "reduce"):
        is_result = step.kind == "all_reduce" or rank == root
        assert_same(mine, fold_reference(firsts, op) if is_result else values[rank][0], what)
    elif step.kind == "broadcast":
        assert_same(mine, values[root][0], what)
    elif step.kind == "all_gather" or (step.kind == "gather" and rank == root):
        for output, first in zip(outputs, firsts, strict=True):
            assert_same(output, first, what)
    elif step.kind == "reduce_scatter":
        assert_same(outputs[0], fold_reference([row[rank] for row in values], op), what)
    elif step.kind == "all_to_all":
        for output, row in zip(outputs, values, strict=True):
            assert_same(output, row[rank], what)
    elif step.kind == "message":
        assert_same(outputs[0], values[(rank - 1) % size][0], what)


def run_program(program: list[Step]) -> int:
    for number, step in enumerate(program):
        take(step, number)
    return len(program)


@pytest.mark.parametrize("core", CORES)
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=st.lists(steps, min_size=10, max_size=40), num_ranks=st.integers(1, 4), number=st.integers(0, 10**9))
def test_every_step_of_a_program_is_right(
    world: World, tmp_path: Path, core: str, program: list[Step], num_ranks: int, number: int
) -> None:
    folder = tmp_path / str(number)
    folder.mkdir(exist_ok=True)
    done = world.run(on_shm, folder, core, run_program, program, num_ranks=num_ranks, backend=None)
    assert done == [len(program)] * num_ranks
