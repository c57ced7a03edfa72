"""Latency of store operations: ours against torch's stores and the plain Redis client."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from benchmarks.harness import Budget, Case, Note, Row, Workload, compare
from benchmarks.machine import ROOT
from torsh_distributed.comm.store import TcpStoreServer, open_store
from torsh_distributed.launch.nodes.store_process import StoreProcess

_TIMEOUT = timedelta(seconds=30)
_VALUE = b"x" * 64
_SECRET = "the secret of a benchmark"


@dataclass(frozen=True)
class _Client:
    """The four operations under common names."""

    set: Callable[[str, bytes], object]
    get: Callable[[str], object]
    add: Callable[[str, int], object]
    wait: Callable[[str], object] | None


def _store_client(store: Any) -> _Client:
    """For our stores and torch's, which share their interface."""
    return _Client(store.set, store.get, store.add, lambda key: store.wait([key], _TIMEOUT))


def _rows_of(kind: str, clients: Mapping[str, tuple[_Client, _Client]], budget: Budget) -> Iterator[Row]:
    """Rows for one kind of store; each contestant has two clients, one to set a key and one to wait for it."""
    for mine, _ in clients.values():
        mine.set("present", _VALUE)

    def row(name: str, workload: Callable[[_Client], Workload], *, amount: float = 1) -> Row:
        workloads = {who: workload(mine) for who, (mine, _) in clients.items()}
        return compare(f"{kind}: {name}", workloads.pop("torsh"), workloads, budget=budget, amount=amount)

    yield row("set 64 bytes", lambda client: lambda: client.set("key", _VALUE))
    yield row("get", lambda client: lambda: client.get("present"))
    yield row("add", lambda client: lambda: client.add("counter", 1))
    waiters = {who: pair for who, pair in clients.items() if pair[0].wait is not None}
    with contextlib.ExitStack() as stack:
        throws = {who: stack.enter_context(_handing_over(*pair)) for who, pair in waiters.items()}
        yield compare(f"{kind}: set wakes a waiter", throws.pop("torsh"), throws, budget=budget, amount=2)


@contextlib.contextmanager
def _handing_over(mine: _Client, theirs: _Client) -> Iterator[Workload]:
    """A key set here wakes a thread, which sets one that wakes this thread: two wake-ups per call."""
    numbers = itertools.count()
    assert mine.wait is not None
    assert theirs.wait is not None
    answer_wait, wait = theirs.wait, mine.wait
    is_over = threading.Event()

    def answer() -> None:
        for number in itertools.count():
            answer_wait(f"there{number}")
            if is_over.is_set():
                return
            theirs.set(f"back{number}", b"1")

    def throw() -> None:
        number = next(numbers)
        mine.set(f"there{number}", b"1")
        wait(f"back{number}")

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield throw
    finally:
        is_over.set()
        mine.set(f"there{next(numbers)}", b"1")
        thread.join()


def _rows(budget: Budget) -> Iterator[Row | Note]:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:

        def ours(url: str) -> _Client:
            return _store_client(stack.enter_context(open_store(url, timeout_s=30)))

        memory, torch_memory = ours("memory://"), _store_client(dist.HashStore())
        yield from _rows_of("memory", {"torsh": (memory, memory), "torch": (torch_memory, torch_memory)}, budget)

        url, path = f"file://{folder}/ours", f"{folder}/theirs"
        torch_files = (_store_client(dist.FileStore(path, 2)), _store_client(dist.FileStore(path, 2)))
        yield from _rows_of("file", {"torsh": (ours(url), ours(url)), "torch": torch_files}, budget)

        ports = stack.enter_context(_servers())
        url = f"tcp://127.0.0.1:{ports['torsh']}"
        torch_clients = (_torch_tcp(ports["torch"]), _torch_tcp(ports["torch"]))
        yield from _rows_of("tcp", {"torsh": (ours(url), ours(url)), "torch": torch_clients}, budget)

        url, port = stack.enter_context(_job_stores(folder))
        members = [_store_client(stack.enter_context(open_store(url, token=_SECRET))) for _ in range(2)]
        torch_clients = (_torch_tcp(port), _torch_tcp(port))
        yield from _rows_of("torsh run", {"torsh": (members[0], members[1]), "torch": torch_clients}, budget)

        if shutil.which("redis-server") is None:
            yield Note(text="No Redis rows: there is no redis-server on this machine.")
            return
        port = stack.enter_context(_redis_server(folder))
        url = f"redis://127.0.0.1:{port}/0"
        plain = stack.enter_context(_plain_redis(port))
        yield from _rows_of("redis", {"torsh": (ours(url), ours(url)), "redis-py": (plain, plain)}, budget)


def _torch_tcp(port: int) -> _Client:
    return _store_client(dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_TIMEOUT))


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
def _servers() -> Iterator[dict[str, int]]:
    """Both TCP servers in a separate process, as a launcher would run them."""
    command = [sys.executable, "-m", __name__]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
        process.stdin.close()


def _serve() -> None:
    """In that process: start, print the ports, and serve until the other side closes."""
    theirs = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
    with TcpStoreServer() as ours:
        print(json.dumps({"torsh": ours.port, "torch": theirs.port}), flush=True)
        sys.stdin.read()


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
def _plain_redis(port: int) -> Iterator[_Client]:
    import redis

    with redis.Redis(port=port) as client:
        yield _Client(client.set, client.get, client.incrby, None)


CASE = Case(
    title="Stores: latency of one operation",
    about="""One client, one operation at a time, values of 64 bytes; "wakes a waiter" is the time from a set in one
    thread until the thread waiting for the key runs, each with its own client. Both TCP servers run in a second
    process, Redis in a third; neither waits for an answer to a TCP set. "torsh run" is the store that asks workers for
    the job's secret, against the TCPStore it replaces. The rivals are torch's HashStore, FileStore and TCPStore, and
    plain redis-py.""",
    rows=_rows,
)

if __name__ == "__main__":
    _serve()
