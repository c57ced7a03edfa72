"""What torch builds on process groups runs on MPI as on gloo: same program, same numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.bed.world import World
from tests.comm.backends import test_torch_parallelism as torch_parallelism
from tests.comm.backends.mpi.world import MpiWorld, on_mpi

pytestmark = pytest.mark.needs_mpi


def on_both(address: str, folder: Path, case: Callable[[], Any]) -> Any:
    """Runs on every rank, inside a world of gloo: the same program on gloo and, on the same ranks, on MPI."""
    expected = case()
    dist.destroy_process_group()
    return expected, on_mpi(address, folder, 30.0, case)


IN_SHORT = (torch_parallelism.data_parallel, torch_parallelism.sharded, torch_parallelism.sub_groups)


@pytest.mark.parametrize(
    ("num_ranks", "case"),
    [
        pytest.param(num_ranks, case, marks=() if num_ranks == 2 and case in IN_SHORT else pytest.mark.matrix)
        for num_ranks in (2, 3)
        for case in torch_parallelism.CASES
    ],
)
def test_mpi_gives_what_gloo_gives(world: World, mpi_world: MpiWorld, num_ranks: int, case: Callable[[], Any]) -> None:
    with mpi_world.job(num_ranks) as (address, folder):
        for expected, actual in world.run(on_both, address, folder, case, num_ranks=num_ranks, timeout_s=60):
            torch_parallelism.assert_equal(actual, expected)


def test_checkpoints_are_saved_and_loaded(mpi_world: MpiWorld, tmp_path: Path) -> None:
    kept = mpi_world.run(torch_parallelism.save_and_load, tmp_path / "checkpoint", timeout_s=60)
    torch_parallelism.assert_equal(kept[0], kept[1])
