"""The second home of checkpoints: uploaded behind the first, fetched where the first is gone."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from torsh_distributed.checkpoint import CheckpointManager
from torsh_distributed.checkpoint.files.manifest import MARKER
from torsh_distributed.checkpoint.saving.remote_mirror import RemoteMirror
from torsh_distributed.errors import CheckpointError, TorshError
from torsh_distributed.plan import CheckpointConfig


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
    with pytest.raises(CheckpointError, match=r"was saved, but not uploaded: cannot upload .* the network is away"):
        manager.wait()
    manager.close()
    Flaky.failures[0] = 0
    with CheckpointManager(config(tmp_path / "a")) as manager:  # the first one gives the place a rest of 30 s
        manager.save(2, {"x": torch.zeros(1)})
    assert manager.directory.complete_steps() == [2, 1]
    assert RemoteMirror("flaky://bucket/run").steps()[0] == 2


def test_the_newest_whole_one_of_either_tier_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def newest(folder: str) -> tuple[int, float]:
        with CheckpointManager(config(tmp_path / folder)) as manager:
            found = manager.load({"x": torch.zeros(5)})
            assert manager.verify(found.metadata.step) == []
            return found.metadata.step, float(found.values["x"][0])

    with CheckpointManager(config(tmp_path / "a")) as manager:
        for step in (11, 12):
            manager.save(step, {"x": torch.full((5,), float(step))})
    with CheckpointManager(CheckpointConfig(dir=str(tmp_path / "a"))) as manager:
        manager.save(13, {"x": torch.full((5,), 13.0)})  # is in the directory alone
    assert newest("a") == (13, 13.0)
    damaged = tmp_path / "a" / "step-00000013" / "__0_0.distcp"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    whole = tmp_path / "a" / "step-00000012" / "__0_0.distcp"
    whole.write_bytes(whole.read_bytes()[:-1])
    assert newest("a") == (12, 12.0)  # comes back from the remote place
    assert "step-00000013 is damaged" in caplog.text
    assert "step-00000012 is damaged: __0_0.distcp" in caplog.text
    assert newest("b") == (12, 12.0)


def test_a_remote_place_out_of_reach_leaves_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointManager(config(tmp_path / "a")) as manager:
        manager.save(21, {"x": torch.full((5,), 21.0)})

    def away(*args: Any, **options: Any) -> Any:
        raise ConnectionResetError("the network is away")

    monkeypatch.setattr("torsh_distributed.retry.delay_s", lambda policy, attempt: 0.0)
    monkeypatch.setattr(Flaky, "ls", away)
    with CheckpointManager(config(tmp_path / "a")) as manager:
        assert manager.load({"x": torch.zeros(5)}).metadata.step == 21
        assert "the network is away" in caplog.text
    with CheckpointManager(config(tmp_path / "b")) as manager, pytest.raises(TorshError, match="the network is away"):
        manager.load({"x": torch.zeros(5)})


def test_a_slow_upload_stops_no_save_and_its_files_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    put = Flaky.put_file

    def slow(self: Flaky, *args: Any, **options: Any) -> Any:
        assert gate.wait(30)
        return put(self, *args, **options)

    monkeypatch.setattr(Flaky, "put_file", slow)
    with CheckpointManager(config(tmp_path / "a", verify_after_save=False)) as manager:
        manager.save(31, {"x": torch.zeros(5)})
        manager.save(32, {"x": torch.zeros(5)})
        manager.wait_for_commit()
        assert manager.directory.complete_steps() == [32, 31]
        gate.set()
        manager.wait()
        assert RemoteMirror("flaky://bucket/run").steps() == [32, 31]
