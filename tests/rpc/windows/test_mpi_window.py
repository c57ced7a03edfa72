"""Windows over MPI: the same operations with a target that sleeps outside of MPI, and what is refused."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.comm.backends.mpi.world import MpiWorld
from torsh_distributed import rpc
from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument, OperationTimeout
from torsh_distributed.rpc.windows.rdma_devices import rdma_devices, require_rdma

OFFSETS = {torch.int64: [200, 5, 6, 9], torch.float32: [200.0, 5.0, 6.0, 0.0]}


def use_windows_of_a_stopped_process(pids_folder: str, dtype: torch.dtype) -> tuple[list[float], str, bool | None]:
    """Rank 1 is stopped by SIGSTOP while the others use its window."""
    rank, folder = dist.get_rank(), Path(pids_folder)
    windows = rpc.mpi_windows((2, 2), dtype)
    mine, theirs = windows[rank], windows[1]
    mine.tensor.fill_(0)
    (folder / str(rank)).write_text(str(os.getpid()))
    dist.barrier()
    if rank == 1:
        (folder / "left").touch()
    else:
        # A barrier may end here before rank 1 has passed on what ends it on another rank.
        while not (folder / "left").exists():
            time.sleep(0.001)
        pid = int((folder / "1").read_text())
        os.kill(pid, signal.SIGSTOP)
        try:
            for _ in range(50):
                theirs.fetch_and_add(0, 2)
            if rank == 0:
                theirs.put(torch.tensor([4, 5], dtype=dtype), 1)
                with theirs.lock():
                    theirs.accumulate(torch.ones(2, dtype=dtype), 1)
                if dtype == torch.int64:
                    assert theirs.compare_and_swap(3, 0, 9) == 0
                    assert theirs.compare_and_swap(3, 0, 7) == 9
                assert theirs.get(1, 2).tolist() == [5, 6]
            (folder / f"done{rank}").touch()
            while not all((folder / f"done{other}").exists() for other in (0, 2)):
                theirs.get()
        finally:
            os.kill(pid, signal.SIGCONT)
    dist.barrier()
    found = theirs.get().flatten().tolist()
    if rank == 1:
        assert mine.tensor.flatten().tolist() == found
    for access in (
        lambda: theirs.put(torch.ones(2, dtype=dtype), 3),
        lambda: theirs.get(-1, 1),
        lambda: theirs.fetch_and_add(4, 1),
    ):
        with pytest.raises(InvalidArgument, match="outside the window"):
            access()
    if rank != 1:
        with pytest.raises(InvalidArgument, match="another process's"):
            _ = theirs.tensor
    dist.barrier()
    if rank == 0:
        with theirs.lock():
            dist.barrier()
            dist.barrier()
    else:
        dist.barrier()
        with pytest.raises(OperationTimeout, match="holds the window's lock"), theirs.lock(timeout_s=0.05):
            pass
        dist.barrier()
    theirs.close()
    return found, theirs.provider, theirs.kernel_bypass


@pytest.mark.ranks
@pytest.mark.needs_mpi
@pytest.mark.parametrize("dtype", OFFSETS)
def test_a_stopped_owner_takes_no_part(mpi_world: MpiWorld, tmp_path: Path, dtype: torch.dtype) -> None:
    for found, provider, kernel_bypass in mpi_world.run(
        use_windows_of_a_stopped_process, str(tmp_path), dtype, num_ranks=3
    ):
        assert found == OFFSETS[dtype]
        assert provider.startswith("MPI (")
        assert kernel_bypass is True


def test_a_device_that_is_not_there_is_refused_with_what_was_looked_for(tmp_path: Path) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "link_layer").write_text("Ethernet\n")
    assert rdma_devices(tmp_path) == {"mlx5_0/1": "Ethernet"}
    require_rdma("roce", tmp_path)
    with pytest.raises(FeatureNotAvailable, match=r"link_layer with InfiniBand.*found='mlx5_0/1: Ethernet'"):
        require_rdma("infiniband", tmp_path)
    (port / "state").write_text("1: DOWN\n")
    with pytest.raises(FeatureNotAvailable, match="no active roce device"):
        require_rdma("roce", tmp_path)
    assert rdma_devices(tmp_path / "nothing") == {}


def test_nixl_is_refused_with_what_was_looked_for() -> None:
    with pytest.raises(FeatureNotAvailable, match=r"(?s)NIXL.*looked_for='the module nixl"):
        rpc.window("w", (1,), provider="nixl")
