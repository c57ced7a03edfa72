"""The store of a job, in a process of its own."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.bed.ports import free_port
from tests.bed.world import World
from tests.launch.jobs import launch, write_script
from torsh_distributed.comm.store import Store, open_store
from torsh_distributed.launch.nodes.store_process import StoreProcess

pytestmark = pytest.mark.ranks

SECRET = "the secret of this job"
FIND_STORE = """
def store_pid():
    children = open(f"/proc/{launcher}/task/{launcher}/children").read().split()
    (pid,) = [pid for pid in children if "store_process.py" in open(f"/proc/{pid}/cmdline").read()]
    return int(pid)
"""


@pytest.fixture
def store() -> Iterator[StoreProcess]:
    process = StoreProcess(SECRET)
    yield process
    process.close()


def connect(listener: socket.socket) -> Store:
    address, port = listener.getsockname()
    return open_store(f"tcp://{address}:{port}", timeout_s=40, token=SECRET)


def test_a_client_that_comes_before_the_server_is_ready_is_served(store: StoreProcess) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        store.serve([listener])
        with connect(listener) as client, connect(listener) as other:
            client.set("key", "value")
            assert other.get("key") == b"value"


def test_a_launcher_that_leaves_with_a_report_unread_ends_it_without_a_word(
    store: StoreProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        store.serve([listener])
        with socket.create_connection(listener.getsockname()) as stranger:
            stranger.sendall(b"GET / HTTP/1.0")
            assert select.select([store.reports], [], [], 60)[0], "the stranger is not reported"
        store.reports.close()
        assert select.select([store.pidfd], [], [], 60)[0], "it goes on"
    assert capfd.readouterr().err == ""


def test_a_unix_socket_is_the_same_store(store: StoreProcess, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as local:
        local.bind(str(tmp_path / "store"))
        local.listen()
        store.serve([listener, local])
        with connect(listener) as client, open_store(f"unix://{tmp_path}/store", token=SECRET) as other:
            client.set("key", "value")
            assert other.get("key") == b"value"


def test_strangers_are_reported_to_the_launcher_in_one_line(store: StoreProcess) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        store.serve([listener])
        for _ in range(30):
            with socket.create_connection(listener.getsockname(), timeout=20) as stranger:
                stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
                assert stranger.recv(1) == b""
        assert select.select([store.reports], [], [], 20)[0]
        line = store.take_report()
        assert line == "30 connections from 127.0.0.1 were refused: 30 × it speaks a different protocol"
        assert store.take_report() == ""


def test_torchs_own_store_is_served_if_asked_for(store: StoreProcess) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        store.serve_torch(listener)
        address, port = listener.getsockname()
        client = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=40))
        client.set("key", "value")
        assert client.get("key") == b"value"


def test_the_secret_is_in_no_argument_and_no_variable(store: StoreProcess) -> None:
    for name in ("cmdline", "environ"):
        assert SECRET.encode() not in Path(f"/proc/{store.pid}/{name}").read_bytes()


def test_the_next_store_is_empty(store: StoreProcess) -> None:
    for _ in range(3):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            store.serve([listener])
            with connect(listener) as client:
                assert client.add("counter", 1) == 1


def test_it_ends_when_the_launcher_vanishes() -> None:
    start = "from torsh_distributed.launch.nodes.store_process import StoreProcess\nstore = StoreProcess('s')"
    command = [sys.executable, "-c", f"{start}\nprint(store.pid, flush=True)\ninput()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        pidfd = os.pidfd_open(int(launcher.stdout.readline()))
        launcher.kill()
    assert select.select([pidfd], [], [], 40)[0], "the store's process is still there"
    os.close(pidfd)


def test_a_store_that_is_killed_ends_the_job_and_is_named(world: World, tmp_path: Path) -> None:
    ending = "if rank == 0:\n    os.kill(store_pid(), signal.SIGKILL)\nsignal.pause()\n"
    (outcome,) = launch(world, write_script(tmp_path, FIND_STORE, ending), max_restarts=1)
    assert outcome.value == 1, outcome.output
    assert "the process of the workers' store" in outcome.output
    assert f"ended: signal {int(signal.SIGKILL)} (SIGKILL, killed)" in outcome.output


@pytest.mark.parametrize("has_fixed_port", [False, True], ids=["free port", "fixed port"])
@pytest.mark.parametrize("serves_torch", [False, True], ids=["ours", "torch's"])
def test_a_restart_keeps_the_process_unless_torchs_port_is_fixed(
    world: World, tmp_path: Path, has_fixed_port: bool, serves_torch: bool
) -> None:
    port = free_port() if has_fixed_port else None
    ending = 'leave(f"{attempt}", f"{store_pid()} {os.environ[\'MASTER_PORT\']}")\nsys.exit(attempt == 0)\n'
    script = write_script(tmp_path, FIND_STORE, ending)
    (outcome,) = launch(
        world, script, max_restarts=1, nproc_per_node=1, master_port=port, serves_torch_store=serves_torch
    )
    assert outcome.value == 0, outcome.output
    (pid, used), (next_pid, next_used) = ((tmp_path / name).read_text().split() for name in "01")
    assert (pid == next_pid) is not (has_fixed_port and serves_torch)
    assert (used == next_used) is has_fixed_port
