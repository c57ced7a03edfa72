"""Who may be a group: different processes of one MPI job, numbered as MPI does; an absent MPI is said everywhere."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.bed.world import World
from tests.comm.backends.mpi.world import MpiWorld, on_mpi
from torsh_distributed.comm.backends import announce_backends
from torsh_distributed.comm.backends.capabilities import BackendType, choose_backend
from torsh_distributed.comm.backends.mpi.group import MpiProcess, check_processes
from torsh_distributed.comm.backends.mpi.library import library
from torsh_distributed.errors import BackendError, ConfigurationError, FeatureNotAvailable, OperationTimeout
from torsh_distributed.launch.mpi.pmi_worker import connect


def process(mpi_rank: int, *, mpi_size: int = 2, rank: int | None = None, world_size: int | None = None) -> MpiProcess:
    return MpiProcess(
        mpi_rank=mpi_rank, mpi_size=mpi_size, library="MPICH", rank=rank, world_size=world_size, group_id="abc"
    )


def test_the_processes_of_one_job_are_accepted() -> None:
    check_processes([process(0, rank=0, world_size=2), process(1, rank=1, world_size=2)])


def test_a_world_made_anew_may_be_smaller_and_in_another_order() -> None:
    check_processes([process(3, mpi_size=4), process(0, mpi_size=4)])


def test_another_world_size_is_refused_with_both() -> None:
    with pytest.raises(ConfigurationError, match="the MPI job has 2 processes, but the world has 4 ranks"):
        check_processes([process(0, rank=0, world_size=4), process(1, rank=1, world_size=4)])


def test_another_rank_is_refused_with_both() -> None:
    with pytest.raises(ConfigurationError, match="rank 0 is process 1 of the MPI job"):
        check_processes([process(1, rank=0, world_size=2), process(0, rank=1, world_size=2)])


def test_one_process_cannot_be_two_ranks() -> None:
    with pytest.raises(ConfigurationError, match="not processes of one MPI job"):
        check_processes([process(0), process(0)])


def join_without_a_job(folder: Path) -> None:
    """Runs on every rank: started as usual, so that MPI takes each process for a job of one."""
    announce_backends()
    size = int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group(
        "mpi4py", store=store, rank=int(os.environ["RANK"]), world_size=size, timeout=timedelta(seconds=20)
    )


@pytest.mark.needs_mpi
def test_processes_that_mpi_did_not_start_together_are_refused_everywhere(world: World, tmp_path: Path) -> None:
    outcomes = world.outcomes(join_without_a_job, tmp_path, num_ranks=2, backend=None)
    for outcome in outcomes:
        assert isinstance(outcome.error, ConfigurationError)
        assert "the MPI job has 1 processes, but the world has 2 ranks" in str(outcome.error)
        assert "torsh run --mpi" in str(outcome.error)


def join_in_reverse(address: str, folder: Path) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ.update(connect(address, attempt=0, rank=size - 1 - rank, size=size))
    join_without_a_job(folder)


@pytest.mark.needs_mpi
def test_ranks_that_mpi_numbers_otherwise_are_refused_everywhere(world: World, mpi_world: MpiWorld) -> None:
    with mpi_world.job(2) as (address, folder):
        outcomes = world.outcomes(join_in_reverse, address, folder, num_ranks=2, backend=None)
    for outcome in outcomes:
        assert isinstance(outcome.error, ConfigurationError)
        assert "rank 0 is process 1 of the MPI job" in str(outcome.error)


def come_or_not(address: str, folder: Path) -> None:
    if os.environ["RANK"] != "1":
        on_mpi(address, folder, 1.0, dist.barrier)


@pytest.mark.needs_mpi
def test_a_rank_that_does_not_come_is_named(world: World, mpi_world: MpiWorld) -> None:
    with mpi_world.job(3) as (address, folder):
        outcomes = world.outcomes(come_or_not, address, folder, num_ranks=3, backend=None)
    for rank in (0, 2):
        error = outcomes[rank].error
        assert isinstance(error, OperationTimeout)
        assert error.context["missing_ranks"] == [1]


def come_without_mpi4py(address: str, folder: Path) -> None:
    if os.environ["RANK"] == "1":
        sys.modules["mpi4py"] = None  # type: ignore[assignment]  # Python's own way to say: not importable
    on_mpi(address, folder, 20.0, dist.barrier)


@pytest.mark.needs_mpi
def test_a_rank_without_mpi4py_says_so_and_the_others_say_which(world: World, mpi_world: MpiWorld) -> None:
    with mpi_world.job(2) as (address, folder):
        outcomes = world.outcomes(come_without_mpi4py, address, folder, num_ranks=2, backend=None)
    assert isinstance(outcomes[1].error, FeatureNotAvailable)
    assert 'pip install "torsh-distributed[mpi]"' in str(outcomes[1].error)
    assert isinstance(outcomes[0].error, BackendError)
    assert "rank 1 cannot use MPI: mpi4py is not installed" in str(outcomes[0].error)


def choose_without_mpi4py() -> None:
    sys.modules["mpi4py"] = None  # type: ignore[assignment]  # Python's own way to say: not importable
    choose_backend("mpi4py")


def test_choosing_it_without_the_extra_names_the_extra(world: World) -> None:
    with pytest.raises(FeatureNotAvailable, match=r'pip install "torsh-distributed\[mpi\]"'):
        world.run(choose_without_mpi4py, num_ranks=1, backend=None)


@pytest.mark.needs_mpi
def test_it_is_a_backend_like_the_others() -> None:
    assert choose_backend("mpi4py") == BackendType.MPI
    assert not library().is_usable, "asking does not initialise MPI"


def load_a_wrong_library() -> None:
    os.environ["MPI4PY_LIBMPI"] = "/nowhere/libmpi.so"
    library()


@pytest.mark.needs_mpi
def test_a_library_that_cannot_be_loaded_is_named(world: World) -> None:
    with pytest.raises(FeatureNotAvailable, match="/nowhere/libmpi") as caught:
        world.run(load_a_wrong_library, num_ranks=1, backend=None)
    assert "MPI4PY_LIBMPI" in str(caught.value)


def join_with_an_mpi_for_one_thread(address: str, folder: Path) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ.update(connect(address, attempt=0, rank=rank, size=size))
    mpi = library().mpi
    mpi.Init_thread(mpi.THREAD_SINGLE)
    mpi.COMM_WORLD.Barrier()
    library().forget_segment_names()
    join_without_a_job(folder)


@pytest.mark.needs_mpi
def test_an_mpi_without_threads_is_refused(world: World, mpi_world: MpiWorld) -> None:
    with (
        mpi_world.job(2) as (address, folder),
        pytest.raises(ConfigurationError, match="without support for several threads"),
    ):
        world.run(join_with_an_mpi_for_one_thread, address, folder, num_ranks=2, backend=None)
