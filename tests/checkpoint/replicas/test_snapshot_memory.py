"""Snapshots outlive the workers: a job that starts all of them again goes on without having read a disk."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from torsh_distributed.checkpoint.replicas.snapshot_memory import SnapshotMemory, find_kept
from torsh_distributed.comm.shared_memory.memory_file import KEPT_MEMORY_VARIABLE, make_kept_memory

SCRIPT = """
import json, os, signal, sys
import torch
from torch import nn
import torsh_distributed as td

folder, num_steps, lethal, victims = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
plan = td.Plan.model_validate({
    "mesh": {"dp": 1, "shard": 3},
    "training": {"steps": num_steps, "batch_size": 12},
    "checkpoint": {"enabled": True, "dir": folder + "/checkpoints", "every_steps": 1000, "replica_every_steps": 2},
})
with td.distributed(plan, backend="torsh"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    engine = td.parallelize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), plan, loss_fn=nn.functional.mse_loss)
    found = engine.resume()
    start = engine.num_steps
    losses = {}
    for step in range(start, num_steps):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(12, 8, generator=generator)
        mine = inputs.view(3, 4, 8)[td.rank()]
        losses[step] = engine.step((mine, mine[:, :4].sin()))
        with open(f"{folder}/rank-{td.rank()}.jsonl", "a") as log:
            log.write(json.dumps([os.environ["TORCHELASTIC_RESTART_COUNT"], start, step, losses[step]]) + "\\n")
        engine.checkpoints.replicas.wait()  # a copy that is still being sent lets the next one pass
        if engine.num_steps == lethal and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and td.rank() in victims:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def expected_losses(num_steps: int) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(num_steps):
        inputs = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
        loss = nn.functional.mse_loss(model(inputs), inputs[:, :4].sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.ranks
@pytest.mark.matrix
@pytest.mark.parametrize("victims", [[1], [0, 1, 2]], ids=["one", "all"])
def test_a_sharded_job_that_is_started_again_goes_on_from_memory(tmp_path: Path, victims: list[int]) -> None:
    before = set(Path("/dev/shm").glob("torsh-kept-*"))
    (tmp_path / "train.py").write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torsh_distributed.run", "--nproc-per-node", "3", "--max-restarts", "1"]
    arguments = [str(tmp_path / "train.py"), str(tmp_path), "12", "7", json.dumps(victims)]
    done = subprocess.run(
        [*launcher, *arguments], capture_output=True, text=True, timeout=100, env={**os.environ, "TORSH_LOG": "INFO"}
    )
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "checkpoints").glob("step-*")), "there was nothing on the disk to resume from"
    expected = expected_losses(12)
    for rank in range(3):
        records = [json.loads(line) for line in (tmp_path / f"rank-{rank}.jsonl").read_text().splitlines()]
        again = [record for record in records if record[0] == "1"]
        assert {record[1] for record in again} == {6}, "the step of the last copy that all ranks had"
        assert [record[2] for record in again] == list(range(again[0][1], 12))
        for _, _, step, loss in records:
            assert loss == pytest.approx(expected[step], rel=1e-4)
    assert set(Path("/dev/shm").glob("torsh-kept-*")) == before


@pytest.mark.ranks
def test_nothing_is_kept_beyond_a_launcher_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "wait.py"
    script.write_text("import os, sys, time\nprint(os.environ['TORSH_KEPT_MEMORY'], flush=True)\ntime.sleep(60)\n")
    no_torch = ("--start-method", "spawn")
    command = [sys.executable, "-m", "torsh_distributed.run", *no_torch, "--max-restarts", "1", str(script)]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert job.stdout is not None
    place = Path(job.stdout.readline().split()[-1])
    assert place.stat().st_mode & 0o777 == 0o700
    job.send_signal(signal.SIGKILL)
    job.wait()
    # The worker holds the pipe: its end comes with the guardian's work, which removes directories last.
    job.stdout.read()
    job.stdout.close()
    deadline = os.times().elapsed + 10
    while place.exists() and os.times().elapsed < deadline:
        os.sched_yield()
    assert not place.exists()


def test_only_whole_snapshots_are_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEPT_MEMORY_VARIABLE, str(tmp_path))
    kept = SnapshotMemory(tmp_path / "world" / "rank-1", [1, 0])
    memory = kept.allocate(100, is_pinned=False)
    assert memory.unique().tolist() == [0]
    memory.fill_(7)
    assert find_kept(part=0, num_parts=1) == {}, "its record is written last"
    kept.record(0, 5, memory, b"facts")
    (found,) = find_kept(part=0, num_parts=1)["world"]
    assert (found.keeper, found.rank, found.step, found.holders, found.facts) == (1, 0, 5, (1, 0), b"facts")
    assert found.memory.unique().tolist() == [7]
    assert find_kept(part=1, num_parts=2) == {}, "another worker of the node reads this one"
    (tmp_path / "world" / "rank-1" / "0.bytes").write_bytes(b"short")
    assert find_kept(part=0, num_parts=1) == {}
    kept.forget(0, 5)
    assert not list(tmp_path.glob("*/*/*.record"))


def test_earlier_worlds_go_and_memory_that_is_not_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEPT_MEMORY_VARIABLE, str(tmp_path))
    earlier = SnapshotMemory(tmp_path / "earlier" / "rank-0", [0])
    earlier.record(0, 1, earlier.allocate(10, is_pinned=False), b"")
    kept = SnapshotMemory(tmp_path / "now" / "rank-0", [0])
    memory = kept.allocate(10, is_pinned=False)
    kept.record(0, 2, memory, b"")
    kept.forget_other_worlds()
    assert list(find_kept(part=0, num_parts=1)) == ["now"]
    kept.forget(0, 2)
    kept.release(memory)
    assert not list((tmp_path / "now" / "rank-0").iterdir())


def test_where_shared_memory_is_full_a_copy_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEPT_MEMORY_VARIABLE, str(tmp_path))
    kept = SnapshotMemory(tmp_path / "world" / "rank-0", [0])

    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    memory = kept.allocate(10, is_pinned=False)
    kept.record(0, 1, memory, b"")
    assert find_kept(part=0, num_parts=1) == {}
    assert memory.tolist() == [0] * 10


@pytest.mark.needs_cuda
def test_a_gpu_copies_into_kept_memory_as_into_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    place = make_kept_memory()
    assert place is not None
    monkeypatch.setenv(KEPT_MEMORY_VARIABLE, str(place))
    kept = SnapshotMemory(place / "world" / "rank-0", [0])
    memory = kept.allocate(1 << 20, is_pinned=True)
    assert memory.is_pinned()
    memory.copy_(torch.full((1 << 20,), 9, dtype=torch.uint8, device="cuda"), non_blocking=True)
    torch.cuda.synchronize()
    kept.record(0, 1, memory, b"")
    (found,) = find_kept(part=0, num_parts=1)["world"]
    assert found.memory.unique().tolist() == [9]
    kept.release(memory)
    assert not memory.is_pinned()
    shutil.rmtree(place)
