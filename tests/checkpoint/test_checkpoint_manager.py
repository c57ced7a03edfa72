"""A loop of one's own: what is saved comes back, bit for bit, and what cannot be saved or loaded says so."""

from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from torsh_distributed import events
from torsh_distributed.checkpoint import CheckpointManager
from torsh_distributed.checkpoint.files.block_hashes import record_of
from torsh_distributed.checkpoint.files.checkpoint_directory import CheckpointDirectory, DirectoryLock
from torsh_distributed.checkpoint.files.manifest import DCP_INDEX, MARKER, data_file, marker_for
from torsh_distributed.errors import CheckpointError, InvalidArgument, SerializationError, TorshError
from torsh_distributed.plan import CheckpointConfig


class Counter:
    """An object of one's own with state."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"count": 0, "history": [torch.zeros(3)], "shape": (1, 2)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def trained(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3, dtype=torch.float32))
    model.register_buffer("rounded", torch.randn(4).bfloat16())
    model.register_buffer("nothing", torch.empty(0, 3))
    optimizer = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.1}])
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 7)).square().mean().backward()
        optimizer.step()
    counter = Counter()
    counter.state = {"count": 5 + seed, "history": [torch.randn(3)], "shape": (3, 4)}
    return {"model": model, "optimizer": optimizer, "counter": counter, "note": f"seed {seed}"}


def bits(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (value.dtype, tuple(value.shape), value.detach().contiguous().view(-1).view(torch.uint8).tolist())
    if isinstance(value, dict):
        return {key: bits(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(bits(part) for part in value)
    return value


def moments(state: dict[str, Any]) -> list[int]:
    return [one["exp_avg"].data_ptr() for one in state["optimizer"].state.values()]


def state_bits(state: dict[str, Any]) -> Any:
    return {key: bits(one.state_dict() if hasattr(one, "state_dict") else one) for key, one in state.items()}


@pytest.mark.parametrize("level", [0, 3])
def test_everything_comes_back_bit_for_bit(tmp_path: Path, level: int) -> None:
    if level:
        pytest.importorskip("zstandard", reason="zstandard is not installed")
    state, other = trained(1), trained(2)
    config = CheckpointConfig(dir=str(tmp_path / "c"), compression_level=level)
    with CheckpointManager(config) as manager:
        torch.manual_seed(9)
        np.random.seed(9)
        manager.save(3, state, loss=0.25)
        drawn = (torch.rand(2).tolist(), np.random.rand(2).tolist())
        places = moments(other)
        found = manager.load(other)
        assert moments(other) == places  # in place: no second copy of the optimizer's state
        assert (torch.rand(2).tolist(), np.random.rand(2).tolist()) == drawn
    assert state_bits({**other, "note": found.values["note"]}) == state_bits(state)
    assert (found.metadata.step, found.metadata.loss, found.metadata.world_size) == (3, 0.25, 1)
    assert found.metadata.versions["torch"] == torch.__version__


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("level", [0, 3])
def test_plain_torch_reads_the_tensors_without_us(tmp_path: Path, level: int) -> None:
    if level:
        pytest.importorskip("zstandard", reason="zstandard is not installed")
    state = trained(1)
    with CheckpointManager(CheckpointConfig(dir=str(tmp_path), compression_level=level)) as manager:
        manager.save(1, state)
    expected = {f"model.{name}": value for name, value in state["model"].state_dict().items()}
    expected["optimizer.state.0.weight.exp_avg"] = state["optimizer"].state[state["model"][0].weight]["exp_avg"]
    target = {name: torch.zeros_like(value) for name, value in expected.items()}
    dcp.load(target, checkpoint_id=tmp_path / "step-00000001", no_dist=True)
    assert bits(target) == bits(expected)


def test_a_write_in_the_background_leaves_the_copy_alone(tmp_path: Path) -> None:
    """The state changes right after save returns; what is saved is what it was."""
    state, other = trained(1), trained(2)
    seen: list[Any] = []
    unsubscribe = events.subscribe(seen.append, events.CheckpointEvent)
    with CheckpointManager(tmp_path) as manager:
        before = state_bits(state)
        manager.save(1, state, wait=False)
        with torch.no_grad():
            for param in state["model"].parameters():
                param.fill_(7.0)
        manager.wait()
        found = manager.load(other)
    unsubscribe()
    assert state_bits({**other, "note": found.values["note"]}) == before
    assert [event.action for event in seen] == ["copied", "saved", "loaded"]
    assert all(event.duration_s is not None and event.num_bytes for event in seen[:2])


def test_old_ones_go_and_the_best_and_every_fifth_stay(tmp_path: Path) -> None:
    state = {"x": torch.zeros(2)}
    config = CheckpointConfig(dir=str(tmp_path), keep=2, keep_best=1, keep_every=5)
    with CheckpointManager(config) as manager:
        for step, loss in enumerate([3.0, 1.0, 2.0, 2.5, 2.5, 2.5, 2.5, 2.5], 1):
            manager.save(step, state, loss=loss)
        manager.wait()
        assert [one.step for one in manager.list()] == [8, 7, 5, 2]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".step")) == []


def test_a_state_is_saved_if_its_metric_is_the_lowest_so_far(tmp_path: Path) -> None:
    with CheckpointManager(CheckpointConfig(dir=str(tmp_path), keep=9)) as manager:
        for step, metric in enumerate([3.0, 2.0, 2.5, 1.0], 1):
            assert manager.save_if_best(step, {"x": torch.zeros(2)}, metric) == (step != 3)
        manager.wait()
        assert [one.step for one in manager.list()] == [4, 2, 1]


def test_the_newest_whole_one_is_loaded_and_the_damaged_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"x": torch.full((1000,), float(step))})
        manager.wait()
        flip(tmp_path / "step-00000003" / data_file(0), 1500)
        (tmp_path / "step-00000002" / MARKER).unlink()
        with caplog.at_level(logging.WARNING):
            found = manager.load({"x": torch.zeros(1000)})
        assert found.metadata.step == 1
        assert float(found.values["x"][0]) == 1.0
        assert "step-00000003 is damaged: __0_0.distcp, bytes 0 to" in caplog.text
        assert "step-00000002 is damaged: COMMITTED cannot be read" in caplog.text.replace(": cannot", " cannot")
        with pytest.raises(CheckpointError, match=r"__0_0\.distcp, bytes 0 to"):
            manager.load({"x": torch.zeros(1000)}, step=3)


def flip(path: Path, place: int, bit: int = 3) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def test_another_models_checkpoint_is_refused_with_every_difference(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))})
        other = nn.ModuleDict({"0": nn.Linear(4, 5), "1": nn.LayerNorm(4).bfloat16(), "last": nn.Linear(4, 2)})
        before = bits(other.state_dict())
        with pytest.raises(CheckpointError) as caught:
            manager.load({"model": other})
        text = str(caught.value)
        for part in (
            "model.0.weight has shape (5, 4) here and (4, 4) in the checkpoint",
            "model.1.weight is torch.bfloat16 here and torch.float32 in the checkpoint",
            "model.last.weight is not in the checkpoint; the most similar there is model.2.weight",
            "model.2.bias is in the checkpoint, but not in the model",
        ):
            assert part in text
        assert bits(other.state_dict()) == before
        manager.load({"model": other}, strict=False)
        assert bits(other.state_dict()) == before  # what differs in dtype is not loaded either


def test_what_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"fn": print}

    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(SerializationError, match="builtin"):
            manager.save(1, {"odd": Odd()})
        with pytest.raises(InvalidArgument, match="no module given with it"):
            manager.save(1, {"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)})
        manager.save(1, {"x": torch.zeros(1)})  # still works
        assert manager.verify(1) == []


def test_the_path_is_refused_where_nothing_may_be_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / DCP_INDEX).write_text("another tool's")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "step-00000001").symlink_to(tmp_path / "foreign")
    for name, text in (
        ("file", "it is a file"),
        ("file/inside", "cannot be written: not a directory"),
        ("foreign", r"holds other files, such as \.metadata"),
        ("linked", "is a symbolic link"),
    ):
        manager = CheckpointManager(tmp_path / name)
        with pytest.raises(CheckpointError, match=text):
            manager.save(1, {"x": torch.zeros(1)})
        manager.close()
    assert (tmp_path / "foreign" / DCP_INDEX).read_text() == "another tool's"
    assert [path.name for path in (tmp_path / "foreign").iterdir()] == [DCP_INDEX]
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        CheckpointManager(tmp_path / "foreign").load({})


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc/self/mounts").exists(), reason="needs mount points")
def test_a_read_only_place_is_refused() -> None:
    manager = CheckpointManager("/proc/checkpoints")
    with pytest.raises(CheckpointError, match=r"cannot be written"):
        manager.save(1, {"x": torch.zeros(1)})
    manager.close()


def test_a_second_job_is_refused(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as first:
        first.save(1, {"x": torch.zeros(1)})
        second = CheckpointManager(tmp_path)
        with pytest.raises(CheckpointError, match=f"another job writes to .*process {os.getpid()}"):
            second.save(2, {"x": torch.zeros(1)})
        second.close()
        first.save(2, {"x": torch.zeros(1)})
    with CheckpointManager(tmp_path) as third:
        third.save(3, {"x": torch.zeros(1)})


def test_a_second_job_is_refused_when_it_begins(tmp_path: Path) -> None:
    state = {"x": torch.zeros(1)}
    with CheckpointManager(tmp_path) as first:
        assert first.resume(state) is None
        with CheckpointManager(tmp_path) as second, pytest.raises(CheckpointError, match="another job writes to"):
            second.resume(state)
        first.save(1, state)
        with CheckpointManager(tmp_path) as reader:
            assert reader.load(state).metadata.step == 1, "reading needs no lock"
    with CheckpointManager(tmp_path) as third:
        assert third.resume(state) is not None


def test_a_child_that_outlives_its_job_does_not_keep_the_directory(tmp_path: Path) -> None:
    """As a loader's worker does for some seconds after its rank was killed."""
    lock = DirectoryLock(CheckpointDirectory(tmp_path))
    read_end, write_end = os.pipe()
    is_forked, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        os.write(tell, b"!")
        os.read(read_end, 1)  # until the test ends
        os._exit(0)
    try:
        os.read(is_forked, 1)  # what a fork does in the child is done
        with pytest.raises(CheckpointError, match="another job writes to"):
            DirectoryLock(CheckpointDirectory(tmp_path))
        lock.release()
        DirectoryLock(CheckpointDirectory(tmp_path)).release()
    finally:
        for end in (read_end, write_end, is_forked, tell):
            os.close(end)
        os.waitpid(child, 0)


def test_a_full_disk_in_the_middle_leaves_older_ones_and_nothing_else(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: the write fails in its middle with an error of the system."""
    state = {"x": torch.zeros(1 << 20)}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
            manager.save(2, state, wait=False)  # raises at the next call
            with pytest.raises(CheckpointError, match=r"step 2 was not saved: rank 0: .*__0_0\.distcp.*too large"):
                manager.save(3, state)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)
        assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-00000001"]
        manager.save(4, state)
        assert manager.directory.complete_steps() == [4, 1]


def test_a_newer_format_is_refused_and_not_skipped(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"x": torch.zeros(1)})
        manager.save(2, {"x": torch.zeros(1)})
        manager.wait()
        (tmp_path / "step-00000002" / MARKER).write_text(json.dumps({"format": 2, "manifest": {}}))
        with pytest.raises(CheckpointError, match=r"is of format 2 \(COMMITTED says so\)"):
            manager.load({"x": torch.zeros(1)})


class Hostile:
    """Unpickling it leaves a mark."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def test_a_hostile_pickle_is_never_opened(tmp_path: Path) -> None:
    """Even with hashes that fit: nothing that we read is a pickle."""
    mark = tmp_path / "mark"
    with CheckpointManager(tmp_path / "c") as manager:
        manager.save(1, {"x": torch.ones(5)})
        manager.wait()
        step = tmp_path / "c" / "step-00000001"
        evil = pickle.dumps(Hostile(mark))
        manifest = json.loads((step / "manifest.json").read_text())
        for name in (DCP_INDEX, "shared.state", "rank-0.state"):
            (step / name).write_bytes(evil)
            manifest["files"][name] = record_of(evil).to_json()
        text = json.dumps(manifest).encode()
        (step / "manifest.json").write_bytes(text)
        (step / MARKER).write_bytes(marker_for(text))
        with pytest.raises(TorshError):
            manager.load({"x": torch.zeros(5)})
    assert not mark.exists()


@pytest.mark.ranks
def test_an_interrupted_save_is_not_a_checkpoint_and_is_removed(tmp_path: Path) -> None:
    program = """
import os, sys, torch
from torsh_distributed.checkpoint import CheckpointManager
import torsh_distributed.checkpoint.saving.checkpoint_commit as commit
manager = CheckpointManager(sys.argv[1])
manager.save(1, {"x": torch.ones(10)})
commit.marker_for = lambda text: os.kill(os.getpid(), 9)
manager.save(2, {"x": torch.ones(10)})
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert sorted(path.name[:14] for path in tmp_path.iterdir()) == [".lock", ".step-00000002", "step-00000001"]
    with CheckpointManager(tmp_path) as manager:
        assert manager.load({"x": torch.zeros(10)}).metadata.step == 1
        manager.save(3, {"x": torch.ones(10)})
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-00000001", "step-00000003"]


def test_a_signal_saves_and_ends_with_its_code(tmp_path: Path) -> None:
    state = {"x": torch.ones(3)}
    with CheckpointManager(CheckpointConfig(dir=str(tmp_path), every_steps=100)) as manager:
        manager.watch()
        assert not manager.after_step(1, state)
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(SystemExit) as caught:
            manager.after_step(2, state)
            manager.after_step(3, state)
        assert caught.value.code == 75
        assert [one.reason for one in manager.list()] == ["signal"]
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_a_run_that_went_back_keeps_what_it_saves(tmp_path: Path) -> None:
    """The newest is damaged, and only one is kept: what is saved now is older, and the only good one."""
    config = CheckpointConfig(dir=str(tmp_path), keep=1, keep_best=0)
    with CheckpointManager(config) as manager:
        manager.save(1, {"x": torch.full((3,), 1.0)})
        manager.wait()
        shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000009")
        flip(tmp_path / "step-00000009" / data_file(0), 100)
        assert manager.load({"x": torch.zeros(3)}).metadata.step == 1
        for step in (2, 3):
            manager.save(step, {"x": torch.full((3,), float(step))})
            manager.wait()
            assert manager.load({"x": torch.zeros(3)}).values["x"].tolist() == [float(step)] * 3


def test_another_optimizer_is_refused_before_the_model_is_replaced(tmp_path: Path) -> None:
    def build(*layers: int) -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        params = [param for layer in layers for param in model[layer].parameters()]
        return {"model": model, "optimizer": torch.optim.SGD(params, lr=0.1, momentum=0.9)}

    with CheckpointManager(tmp_path) as manager:
        manager.save(1, build(0, 1))
        other = build(1)
        before = bits(other["model"].state_dict())
        for strict in (True, False):
            with pytest.raises(
                CheckpointError, match=r"other parameters or groups: 0\.bias is in the checkpoint alone"
            ):
                manager.load(other, strict=strict)
        assert bits(other["model"].state_dict()) == before
        manager.load({"model": other["model"]})
        assert bits(other["model"].state_dict()) != before


def test_a_quota_that_the_disk_notices_last_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As over a network: the write succeeds, and waiting for the disk fails."""

    def full(file: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with CheckpointManager(tmp_path) as manager:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"rank-0\.state cannot be written: disk quota exceeded"):
            manager.save(1, {"x": torch.zeros(1)})
        monkeypatch.undo()
        manager.save(2, {"x": torch.zeros(1)})
        assert manager.directory.complete_steps() == [2]
