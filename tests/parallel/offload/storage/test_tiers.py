"""Tiers: allocations stay within their budgets, and the disk tier's file leaves nothing behind."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bed.world import World
from torsh_distributed.errors import IoError, MemoryAllocationFailed
from torsh_distributed.parallel.offload.storage.tiers import DiskTier, HostTier


def test_over_budget_is_refused_before_anything_is_allocated() -> None:
    tier = HostTier(1000, is_pinned=False)
    kept = tier.allocate(600, "the first")
    with pytest.raises(MemoryAllocationFailed, match="the second needs 600 bytes of host memory, but 400 of 1000"):
        tier.allocate(600, "the second")
    assert tier.budget.used_bytes == 600
    tier.free(kept)
    assert (tier.budget.used_bytes, tier.budget.peak_bytes) == (0, 600)


@settings(max_examples=25)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20_000)), max_size=30))
def test_allocations_in_the_file_never_overlap(
    tmp_path_factory: pytest.TempPathFactory, work: list[tuple[bool, int]]
) -> None:
    tier = DiskTier(tmp_path_factory.mktemp("disk"), 1 << 30)
    live = []
    for number, (frees, size) in enumerate(work):
        if frees and live:
            tier.free(live.pop(size % len(live))[0])
        allocation = tier.allocate(size, "an array")
        allocation.tensor.fill_(number)
        live.append((allocation, number))
    for allocation, number in live:
        assert (allocation.tensor == number).all()
    assert tier.budget.used_bytes == sum(allocation.charged_bytes for allocation, _ in live)
    for allocation, _ in live:
        tier.free(allocation)
    tier.close()


def test_a_full_disk_is_an_error_that_says_so(tmp_path: Path) -> None:
    """The limit on file size stands in for a full disk: the same call fails, before any page is mapped."""
    tier = DiskTier(tmp_path, 1 << 30)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        tier.allocate(1 << 15, "the first")
        with pytest.raises(IoError, match="has no room for the second") as caught:
            tier.allocate(1 << 16, "the second")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.context["errno"] in (errno.EFBIG, errno.ENOSPC)
    assert str(tmp_path) in str(caught.value)
    assert tier.budget.used_bytes == 1 << 15
    tier.close()


def test_a_small_file_system_that_is_full_is_an_error_too(tmp_path: Path) -> None:
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", tmp_path]).returncode:
        pytest.skip("needs root, to mount a small file system")
    try:
        tier = DiskTier(tmp_path, 1 << 30)
        tier.allocate(1 << 15, "the first")
        with pytest.raises(IoError, match="free some space"):
            tier.allocate(1 << 16, "the second")
        tier.close()
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(IoError, match="missing: No such file"):
        DiskTier(tmp_path / "missing", 1 << 20)


def write_and_die(folder: Path) -> None:
    allocation = DiskTier(folder, 1 << 30).allocate(1 << 20, "an array")
    allocation.tensor.fill_(1)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_leaves_nothing_on_the_disk(tmp_path: Path, world: World) -> None:
    (outcome,) = world.outcomes(write_and_die, tmp_path, num_ranks=1, backend=None)
    assert outcome.exit_code == -signal.SIGKILL, outcome
    assert list(tmp_path.iterdir()) == []
