"""Real file systems that are full or read-only: a clear error, and what was there stays whole."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from torsh_distributed.checkpoint import CheckpointManager
from torsh_distributed.checkpoint.files.checkpoint_directory import cannot_write
from torsh_distributed.errors import CheckpointError
from torsh_distributed.plan import CheckpointConfig

Mount = Callable[[str], Path]
STATE = {"x": torch.zeros(600_000)}


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mounts a file system in memory with these options; skips where that is not allowed."""
    places: list[Path] = []

    def mounted(options: str) -> Path:
        place = tmp_path / f"disk{len(places)}"
        place.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no tmpfs with {options} here: {done.stderr.strip()}")
        places.append(place)
        return place

    yield mounted
    for place in places:
        subprocess.run(["umount", "-l", place], check=True)


def test_no_space_in_the_middle_leaves_the_older_one_and_nothing_else(mount: Mount) -> None:
    disk = mount("size=4m")
    with CheckpointManager(disk) as manager:
        manager.save(1, STATE)
        manager.save(2, STATE, wait=False)  # raises at the next call
        with pytest.raises(CheckpointError, match=r"step 2 was not saved: rank 0: .*no space left on device"):
            manager.save(3, STATE)
        assert sorted(path.name for path in disk.iterdir()) == [".lock", "step-00000001"]
        assert manager.verify(1) == []
        (disk / "step-00000001" / "__0_0.distcp").unlink()
        manager.save(4, STATE)
        assert manager.directory.complete_steps()[0] == 4


def test_a_loop_hears_of_a_failed_save_long_before_its_next_one(mount: Mount) -> None:
    with CheckpointManager(CheckpointConfig(dir=str(mount("size=1m")), every_steps=10**6)) as manager:
        manager.save(1, STATE, wait=False)
        deadline, steps = time.monotonic() + 60, itertools.count(2)
        with pytest.raises(CheckpointError, match=r"step 1 was not saved: rank 0: .*no space left on device"):
            while time.monotonic() < deadline:
                manager.after_step(next(steps), STATE)
        for _ in range(1000):  # told once
            manager.after_step(next(steps), STATE)


def test_a_job_that_ends_after_a_failed_save_saves_once_more(mount: Mount) -> None:
    disk = mount("size=4m")
    filler = disk / "filler"
    filler.write_bytes(bytes(3 << 20))
    with CheckpointManager(CheckpointConfig(dir=str(disk / "c"), every_steps=10**6)) as manager:
        manager.watch()
        manager.after_step(1, STATE)
        manager.save(1, STATE, wait=False)
        deadline, steps = time.monotonic() + 60, itertools.count(2)
        while manager.is_writing:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        filler.unlink()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit) as ended:
            while time.monotonic() < deadline:
                manager.after_step(next(steps), STATE)
        assert ended.value.code == 75
        assert manager.directory.complete_steps() == [next(steps) - 1]


def test_a_disk_that_became_read_only_still_loads(mount: Mount) -> None:
    disk = mount("size=20m")
    with CheckpointManager(disk / "c") as manager:
        manager.save(1, STATE)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    with CheckpointManager(disk / "c") as manager:
        with pytest.raises(CheckpointError, match="cannot be written: read-only file system"):
            manager.save(2, STATE)
        assert manager.load(dict(STATE)).metadata.step == 1
    other = CheckpointManager(disk / "d")
    with pytest.raises(CheckpointError, match="cannot be written: read-only file system") as caught:
        other.save(1, STATE)
    other.close()
    assert "set checkpoint.dir to another one" in str(caught.value)
    assert not (disk / "d").exists()


def test_a_quota_is_named() -> None:
    error = cannot_write(Path("/home/me/c"), OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)))
    assert "/home/me/c cannot be written: disk quota exceeded" in str(error)
    assert "the user's quota is used up" in str(error)
