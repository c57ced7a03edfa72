"""A real object store behind the directory: uploads that break are tried again, and half of one is no checkpoint."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.bed.ports import free_port
from tests.bed.world import World
from tests.checkpoint.saving.faulty_proxy import FaultyProxy
from torsh_distributed import retry
from torsh_distributed.checkpoint import CheckpointManager
from torsh_distributed.checkpoint.saving.remote_mirror import RemoteMirror
from torsh_distributed.errors import CheckpointError, TorshError
from torsh_distributed.plan import CheckpointConfig

pytestmark = [pytest.mark.needs_library("moto"), pytest.mark.needs_library("s3fs")]

URL = "s3://checkpoints/run"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """An S3 server with an empty bucket `checkpoints`."""
    port = free_port()
    log = (tmp_path / "server.log").open("wb")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while not is_up(port):
            assert process.poll() is None, (tmp_path / "server.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield "127.0.0.1", port
    finally:
        process.kill()
        process.wait()
        log.close()


def is_up(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def variables(url: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
    }


def model_of(value: float, numel: int) -> nn.Module:
    """Of which rank 0 and rank 1 write about half each."""
    model = nn.Module()
    for name in ("a", "b"):
        model.register_buffer(name, torch.full((numel,), value))
    return model


def manager_of(folder: str) -> CheckpointManager:
    retry.delay_s = lambda policy, attempt: 0.0  # in a process of its own: nobody waits between attempts
    return CheckpointManager(CheckpointConfig(dir=folder, remote=URL, keep=2, keep_best=0))


def make_bucket() -> None:
    import s3fs

    if dist.get_rank() == 0:
        s3fs.S3FileSystem(skip_instance_cache=True).mkdir("checkpoints")
    dist.barrier()


def round_trip(folder: str, numel: int, steps: int) -> tuple[list[int], float]:
    make_bucket()
    with manager_of(folder) as manager:
        for step in range(1, steps + 1):
            manager.save(step, {"model": model_of(float(step), numel)})
        manager.wait()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.barrier()
    with manager_of(folder) as manager:
        target = model_of(0.0, numel)
        found = manager.resume({"model": target})
        assert found is not None
        assert found.metadata.step == steps
        return RemoteMirror(URL).steps(), float(target.get_buffer("b")[-1])


def test_it_goes_there_and_comes_back_though_uploads_break(world: World, server: Any, tmp_path: Path) -> None:
    """The proxy cuts three requests in the middle of a file."""
    with FaultyProxy(server, failures=3, after_bytes=300_000) as proxy:
        env = variables(proxy.url)
        results = world.run(round_trip, str(tmp_path / "c"), 250_000, 3, env=env, timeout_s=90)
        assert proxy.num_cut == 3
    assert results == [([3, 2], 3.0)] * 2


@pytest.mark.matrix
def test_large_files_go_in_parts(world: World, server: Any, tmp_path: Path) -> None:
    """Above 100 MB a file is uploaded in parts; one of them breaks in the middle."""
    with FaultyProxy(server, failures=2, after_bytes=30_000_000) as proxy:
        env = variables(proxy.url)
        results = world.run(round_trip, str(tmp_path / "c"), 30_000_000, 1, env=env, timeout_s=110)
        assert proxy.num_cut == 2
    assert results == [([1], 1.0)] * 2


def never_arrives(folder: str) -> tuple[str, list[int], list[int], list[str]]:
    import s3fs

    with CheckpointManager(folder) as manager:  # the bucket is made while the way is free
        make_bucket()
        manager.save(1, {"model": model_of(1.0, 250_000)})
    manager = manager_of(folder)
    manager.save(2, {"model": model_of(2.0, 250_000)})
    with pytest.raises(CheckpointError) as caught:
        manager.wait()
    manager.close()
    files = s3fs.S3FileSystem(skip_instance_cache=True)
    there = sorted(name.rpartition("/")[2] for name in files.find("checkpoints"))
    return caught.value.message, manager.directory.complete_steps(), RemoteMirror(URL).steps(), there


@pytest.mark.matrix
def test_what_never_arrives_is_no_checkpoint_and_the_directory_is_whole(
    world: World, server: Any, tmp_path: Path
) -> None:
    with FaultyProxy(server, failures=1000, after_bytes=300_000) as proxy:
        for message, local, remote, there in world.run(
            never_arrives, str(tmp_path / "c"), env=variables(proxy.url), timeout_s=90
        ):
            assert "step-00000002 was saved, but not uploaded: cannot upload __" in message
            assert local == [2, 1]
            assert remote == []
            assert "COMMITTED" not in there
            assert not any(name.endswith(".distcp") for name in there)


def refused(folder: str) -> str:
    manager = CheckpointManager(CheckpointConfig(dir=folder, remote="s3://no-such-bucket-here/run"))
    manager.save(1, {"model": model_of(1.0, 10)})
    with pytest.raises(TorshError) as caught:
        manager.wait()
    manager.close()
    return caught.value.message


@pytest.mark.matrix
def test_a_bucket_that_is_not_there_is_not_made_nor_tried_again(world: World, server: Any, tmp_path: Path) -> None:
    env = variables(f"http://{server[0]}:{server[1]}")
    for text in world.run(refused, str(tmp_path / "c"), env=env, timeout_s=60):
        assert "step-00000001 was saved, but not uploaded" in text
    assert os.path.isdir(tmp_path / "c" / "step-00000001")  # noqa: PTH112
