"""Latency of store operations: ours against torch's stores and the plain Redis client."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator

import torch.distributed as dist

from benchmarks.harness import Budget, Case, Note, Row
from torsh_distributed.cli.bench.rivals.store import StoreCalls, rows_of_kind, tcp_clients, torch_tcp_client
from torsh_distributed.comm.store import open_store
from torsh_distributed.launch.nodes.store_process import StoreProcess

_SECRET = "the secret of a benchmark"


def _rows(budget: Budget) -> Iterator[Row | Note]:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:

        def ours(url: str) -> StoreCalls:
            return StoreCalls.of(stack.enter_context(open_store(url, timeout_s=30)))

        memory, torch_memory = ours("memory://"), StoreCalls.of(dist.HashStore())
        yield from rows_of_kind("memory", {"torsh": (memory, memory), "torch": (torch_memory, torch_memory)}, budget)

        url, path = f"file://{folder}/ours", f"{folder}/theirs"
        torch_files = (StoreCalls.of(dist.FileStore(path, 2)), StoreCalls.of(dist.FileStore(path, 2)))
        yield from rows_of_kind("file", {"torsh": (ours(url), ours(url)), "torch": torch_files}, budget)

        yield from rows_of_kind("tcp", tcp_clients(stack), budget)

        url, port = stack.enter_context(_job_stores(folder))
        members = [StoreCalls.of(stack.enter_context(open_store(url, token=_SECRET))) for _ in range(2)]
        torch_clients = (torch_tcp_client(port), torch_tcp_client(port))
        yield from rows_of_kind("torsh run", {"torsh": (members[0], members[1]), "torch": torch_clients}, budget)

        if shutil.which("redis-server") is None:
            yield Note(text="No Redis rows: there is no redis-server on this machine.")
            return
        port = stack.enter_context(_redis_server(folder))
        url = f"redis://127.0.0.1:{port}/0"
        plain = stack.enter_context(_plain_redis(port))
        yield from rows_of_kind("redis", {"torsh": (ours(url), ours(url)), "redis-py": (plain, plain)}, budget)


@contextlib.contextmanager
def _job_stores(folder: str) -> Iterator[tuple[str, int]]:
    """The store of `torsh run` with the job's secret, on its Unix socket, and torch's, each in its own process."""
    ours, theirs = StoreProcess(_SECRET), StoreProcess(_SECRET)
    local = socket.socket(socket.AF_UNIX)
    with local, socket.create_server(("127.0.0.1", 0)) as port:
        local.bind(f"{folder}/store")
        local.listen()
        ours.serve([local])
        theirs.serve_torch(port)
        try:
            yield f"unix://{folder}/store", port.getsockname()[1]
        finally:
            ours.close()
            theirs.close()


@contextlib.contextmanager
def _redis_server(folder: str) -> Iterator[int]:
    """A server without persistence, on a free loopback port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    options = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no", "--dir", folder]
    with subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL) as process:
        try:
            _await_listener(port, process)
            yield port
        finally:
            process.terminate()


def _await_listener(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while process.poll() is None and time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise RuntimeError(f"redis-server did not listen on port {port} (exit code {process.poll()})")


@contextlib.contextmanager
def _plain_redis(port: int) -> Iterator[StoreCalls]:
    import redis

    with redis.Redis(port=port) as client:
        yield StoreCalls(client.set, client.get, client.incrby, None)


CASE = Case(
    title="Stores: latency of one operation",
    about="""One client, one operation at a time, values of 64 bytes; "wakes a waiter" is the time from a set in one
    thread until the thread waiting for the key runs, each with its own client. Both TCP servers run in a second
    process, Redis in a third; neither waits for an answer to a TCP set. "torsh run" is the store that asks workers for
    the job's secret, against the TCPStore it replaces. The rivals are torch's HashStore, FileStore and TCPStore, and
    plain redis-py.""",
    rows=_rows,
)
