"""The second home of checkpoints: uploaded behind the first, fetched where the first is gone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from torsh_distributed.checkpoint import CheckpointManager
from torsh_distributed.checkpoint.files.manifest import MARKER
from torsh_distributed.checkpoint.saving.remote_mirror import RemoteMirror
from torsh_distributed.errors import CheckpointError, IoError
from torsh_distributed.plan import CheckpointConfig, RetryConfig


class Flaky(MemoryFileSystem):
    """Remote storage whose first transfers fail."""

    protocol = "flaky"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    failures: ClassVar[list[int]] = [0]

    def put_file(self, *args: Any, **options: Any) -> Any:
        if self.failures[0]:
            self.failures[0] -= 1
            raise ConnectionResetError("the network is away")
        return super().put_file(*args, **options)


fsspec.register_implementation("flaky", Flaky, clobber=True)


def config(folder: Path, **options: Any) -> CheckpointConfig:
    return CheckpointConfig(dir=str(folder), remote="flaky://bucket/run", keep=2, keep_best=0, **options)


def test_a_lost_directory_comes_back_from_the_remote_one(tmp_path: Path) -> None:
    Flaky.failures[0] = 2
    with CheckpointManager(config(tmp_path / "a")) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"x": torch.full((5,), float(step))})
    assert Flaky.failures[0] == 0
    mirror = RemoteMirror("flaky://bucket/run")
    assert mirror.steps() == [3, 2]
    shutil.rmtree(tmp_path / "a")
    with CheckpointManager(config(tmp_path / "a")) as manager:
        found = manager.resume({"x": torch.zeros(5)})
        assert found is not None
        assert float(found.values["x"][0]) == 3.0
        assert float(manager.load({"x": torch.zeros(5)}, step=2).values["x"][0]) == 2.0
    Flaky().rm_file(next(name for name in Flaky.store if name.endswith(f"step-00000003/{MARKER}")))
    with CheckpointManager(config(tmp_path / "b")) as manager:
        found = manager.resume({"x": torch.zeros(5)})
        assert found is not None
        assert found.metadata.step == 2


def test_what_fails_for_good_raises_at_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Flaky.failures[0] = 1000
    monkeypatch.setattr("torsh_distributed.retry.delay_s", lambda policy, attempt: 0.0)
    manager = CheckpointManager(config(tmp_path / "a"))
    manager.save(1, {"x": torch.zeros(1)})
    with pytest.raises(CheckpointError, match="was saved, but then: remote storage: the network is away"):
        manager.save(2, {"x": torch.zeros(1)})
    Flaky.failures[0] = 0
    manager.close()
    assert manager.directory.complete_steps() == [1]


def test_a_service_that_is_down_costs_a_moment_not_a_timeout_for_every_file(tmp_path: Path) -> None:
    """Two files reach the failing service; the rest are not tried until the break is over."""
    for name in range(20):
        (tmp_path / str(name)).write_text("x")
    policy = RetryConfig(initial_delay_s=0.001, max_delay_s=0.001, failure_threshold=5, break_s=600)
    mirror = RemoteMirror("flaky://bucket/broken", policy)
    Flaky.failures[0] = 1000
    try:
        for name in range(20):
            with pytest.raises(IoError):
                mirror.upload(tmp_path, [str(name)])
        assert Flaky.failures[0] == 995
        with pytest.raises(IoError, match="was not tried: it failed 5 times within 60 s"):
            mirror.upload(tmp_path, ["3"])
    finally:
        Flaky.failures[0] = 0
