"""`torsh bench store`: one operation of a store, ours and torch's; the servers are in a process of their own."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import torch.distributed as dist
import typer

from torsh_distributed.cli.bench.rivals.contest import SAMPLE_S, show_rows
from torsh_distributed.cli.bench.rivals.side_by_side import OURS, Row, SampleBudget, Workload, compare
from torsh_distributed.comm.store import TcpStoreServer, open_store

TIMEOUT = timedelta(seconds=30)
_VALUE = b"x" * 64

app = typer.Typer(add_completion=False)


@app.command()
def store(
    rounds: Annotated[int, typer.Option(min=1, help="Every side is measured this often, in turns.")] = 9,
    output: Annotated[Path | None, typer.Option("--json", help="File for the numbers, as JSON.")] = None,
) -> None:
    """Time operations of a store over TCP and in memory, ours beside torch's.

    One client, one operation at a time, values of 64 bytes. "set wakes a waiter" is the time from a set in one thread
    until the thread that waits for the key runs, each with its own client. Neither TCP
    store waits for an answer to a set.
    """
    budget = SampleBudget(num_samples=rounds, sample_s=SAMPLE_S)
    show_rows(list(_rows(budget)), title="a store, one operation", header="store", output=output)


@dataclass(frozen=True)
class StoreCalls:
    """The four operations under common names."""

    set: Callable[[str, bytes], object]
    get: Callable[[str], object]
    add: Callable[[str, int], object]
    wait: Callable[[str], object] | None

    @classmethod
    def of(cls, opened: Any) -> StoreCalls:
        """Of our stores and torch's, which share their interface."""
        return cls(opened.set, opened.get, opened.add, lambda key: opened.wait([key], TIMEOUT))


def rows_of_kind(
    kind: str, clients: Mapping[str, tuple[StoreCalls, StoreCalls]], budget: SampleBudget
) -> Iterator[Row]:
    """Rows for one kind of store; each contestant has two clients, one to set a key and one to wait for it."""
    for mine, _ in clients.values():
        mine.set("present", _VALUE)

    def row(name: str, workload: Callable[[StoreCalls], Workload], *, amount: float = 1) -> Row:
        workloads = {who: workload(mine) for who, (mine, _) in clients.items()}
        return compare(f"{kind}: {name}", workloads.pop(OURS), workloads, budget=budget, amount=amount)

    yield row("set 64 bytes", lambda client: lambda: client.set("key", _VALUE))
    yield row("get", lambda client: lambda: client.get("present"))
    yield row("add", lambda client: lambda: client.add("counter", 1))
    waiters = {who: pair for who, pair in clients.items() if pair[0].wait is not None}
    with contextlib.ExitStack() as stack:
        throws = {who: stack.enter_context(_handing_over(*pair)) for who, pair in waiters.items()}
        yield compare(f"{kind}: set wakes a waiter", throws.pop(OURS), throws, budget=budget, amount=2)


@contextlib.contextmanager
def _handing_over(mine: StoreCalls, theirs: StoreCalls) -> Iterator[Workload]:
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


def tcp_clients(stack: contextlib.ExitStack) -> dict[str, tuple[StoreCalls, StoreCalls]]:
    """Two clients of each TCP store, whose servers run until the stack is closed."""
    ports = stack.enter_context(_servers())
    url = f"tcp://127.0.0.1:{ports[OURS]}"
    ours = [StoreCalls.of(stack.enter_context(open_store(url, timeout_s=TIMEOUT.total_seconds()))) for _ in range(2)]
    theirs = [torch_tcp_client(ports["torch"]) for _ in range(2)]
    return {OURS: (ours[0], ours[1]), "torch": (theirs[0], theirs[1])}


def torch_tcp_client(port: int) -> StoreCalls:
    """A client of torch's TCPStore on this machine."""
    return StoreCalls.of(dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT))


def _rows(budget: SampleBudget) -> Iterator[Row]:
    with contextlib.ExitStack() as stack:
        yield from rows_of_kind("tcp", tcp_clients(stack), budget)
        ours = StoreCalls.of(stack.enter_context(open_store("memory://", timeout_s=TIMEOUT.total_seconds())))
        theirs = StoreCalls.of(dist.HashStore())
        yield from rows_of_kind("memory", {OURS: (ours, ours), "torch": (theirs, theirs)}, budget)


@contextlib.contextmanager
def _servers() -> Iterator[dict[str, int]]:
    """Both TCP servers in a separate process, as a launcher would run them."""
    command = [sys.executable, "-m", "torsh_distributed.cli.bench.rivals.store"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.stdin.close()


def main() -> None:
    """In that process: start, print the ports, and serve until the other side closes."""
    theirs = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    with TcpStoreServer() as ours:
        print(json.dumps({OURS: ours.port, "torch": theirs.port}), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
