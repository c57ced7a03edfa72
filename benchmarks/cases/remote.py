"""Remote calls between two processes: ours against torch's RPC."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.rpc as torch_rpc

from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit, compare
from benchmarks.machine import ROOT
from torsh_distributed import rpc
from torsh_distributed.rpc.calling.link import Link, PendingCall
from torsh_distributed.rpc.current_worker import current_worker
from torsh_distributed.rpc.messages.lane_pair import CALL
from torsh_distributed.rpc.serving.exposed import TABLE

_CALLEE = "callee"
_NUM_PIPELINED = 200
_PAYLOAD_BYTES = 64 << 20
_WINDOW_BYTES = 1 << 20
_NUM_CONNECTIONS, _CALLS_EACH = 1000, 10


@rpc.expose(inline=True)
def echo(value: Any) -> Any:
    """What was sent."""
    return value


@rpc.expose
def echo_on_a_thread(value: Any) -> Any:
    """What was sent."""
    return value


@rpc.expose
def size_of(tensor: torch.Tensor) -> int:
    """Looks at every page of it, as a function that uses it would."""
    return int(tensor.view(-1)[::1024].sum().item() >= 0) + tensor.nbytes


@rpc.expose
def allocate() -> None:
    """A window of a megabyte."""
    rpc.window("numbers", (_WINDOW_BYTES // 8,), torch.int64)


@rpc.expose
def allow_files() -> None:
    """Open as many files as the system lets this process."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@rpc.expose
def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


_computing = threading.Event()


def _compute() -> None:
    left = torch.ones(256, 256)
    while _computing.is_set():
        left @ left


@rpc.expose
def compute(begins: bool) -> None:
    """Begin, or end, to multiply matrices on another thread."""
    if begins:
        _computing.set()
        threading.Thread(target=_compute, daemon=True).start()
    else:
        _computing.clear()


def _rows(budget: Budget) -> Iterator[Row | Note]:
    with tempfile.TemporaryDirectory() as folder, _callee(folder):
        _join("caller", 0, folder)
        rpc.wait_for_workers([_CALLEE])
        try:
            yield from _compared(budget)
            yield from _windows(budget)
            yield from _many_connections(budget)
        finally:
            rpc.call(_CALLEE, _finish)
            rpc.shutdown()
            torch_rpc.shutdown(graceful=False)


def _compared(budget: Budget) -> Iterator[Row]:
    small = b"1234"

    def row(name: str, ours: Callable[[], object], theirs: Callable[[], object], **options: Any) -> Row:
        return compare(name, ours, {"torch": theirs}, budget=budget, **options)

    def theirs() -> object:
        return torch_rpc.rpc_sync(_CALLEE, echo, args=(small,))

    with _grpc_echo() as grpc_echo:
        rivals = {"torch": theirs, **({} if grpc_echo is None else {"gRPC": lambda: grpc_echo(small)})}
        yield compare("echo of 4 bytes", lambda: rpc.call(_CALLEE, echo, (small,)), rivals, budget=budget)
    yield row("echo of 4 bytes, on a thread", lambda: rpc.call(_CALLEE, echo_on_a_thread, (small,)), theirs)
    rpc.call(_CALLEE, compute, (True,))
    yield row("echo of 4 bytes while the callee computes", lambda: rpc.call(_CALLEE, echo, (small,)), theirs)
    rpc.call(_CALLEE, compute, (False,))

    def pipelined() -> None:
        for future in [rpc.call_async(_CALLEE, echo, (small,)) for _ in range(_NUM_PIPELINED)]:
            future.result()

    def their_pipelined() -> None:
        torch.futures.wait_all([torch_rpc.rpc_async(_CALLEE, echo, args=(small,)) for _ in range(_NUM_PIPELINED)])

    yield row("pipelined calls", pipelined, their_pipelined, amount=_NUM_PIPELINED, unit=Unit.PER_SECOND)

    payload = torch.ones(_PAYLOAD_BYTES // 4)
    copy = torch.empty_like(payload)
    yield compare(
        "64 MB, sent and read",
        lambda: rpc.call(_CALLEE, size_of, (payload,)),
        {
            "torch": lambda: torch_rpc.rpc_sync(_CALLEE, size_of, args=(payload,)),
            "memcpy": lambda: copy.copy_(payload),
        },
        budget=budget,
        amount=_PAYLOAD_BYTES,
        unit=Unit.BYTES_PER_SECOND,
    )
    link = current_worker()._links.connect(_CALLEE)
    payloads = link._lanes.payload
    assert payloads is not None, "both lanes are there"
    payloads.takes_files = False

    def by_socket() -> None:
        pending = PendingCall("size_of", time.monotonic() + 60.0)
        link.begin(CALL, TABLE.name_of(size_of), [payload], {}, pending)
        link.wait(pending)

    yield compare(
        "64 MB, sent and read, by a socket",
        by_socket,
        {"memcpy": lambda: copy.copy_(payload)},
        budget=budget,
        amount=_PAYLOAD_BYTES,
        unit=Unit.BYTES_PER_SECOND,
    )
    link.close()


@contextlib.contextmanager
def _grpc_echo() -> Iterator[Callable[[bytes], bytes] | None]:
    """A call of a gRPC server in the callee: bytes, without a schema; None where gRPC is not installed."""
    try:
        import grpc
    except ModuleNotFoundError:
        yield None
        return
    with grpc.insecure_channel(f"127.0.0.1:{rpc.call(_CALLEE, serve_grpc)}") as channel:
        yield channel.unary_unary("/bench/echo")


@rpc.expose
def serve_grpc() -> int:
    """Start a server of gRPC in this process; returns its port."""
    import grpc

    handler = grpc.unary_unary_rpc_method_handler(lambda request, _: request)
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", {"echo": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    _grpc_servers.append(server)
    return int(port)


_grpc_servers: list[Any] = []
"""They end when they are collected."""


def _windows(budget: Budget) -> Iterator[Row]:
    rpc.call(_CALLEE, allocate)
    numbers = rpc.open_window(_CALLEE, "numbers")
    owner = rpc.worker_info(_CALLEE).pid
    os.kill(owner, signal.SIGSTOP)
    try:
        yield from _operations(numbers, budget)
    finally:
        os.kill(owner, signal.SIGCONT)


def _operations(numbers: Any, budget: Budget) -> Iterator[Row]:
    values, copy = torch.ones(_WINDOW_BYTES // 8, dtype=torch.int64), torch.empty(_WINDOW_BYTES // 8, dtype=torch.int64)
    for name, ours in (
        ("window: put of 1 MB", lambda: numbers.put(values)),
        ("window: get of 1 MB", lambda: numbers.get(out=copy)),
    ):
        yield compare(
            name,
            ours,
            {"memcpy": lambda: copy.copy_(values)},
            budget=budget,
            amount=_WINDOW_BYTES,
            unit=Unit.BYTES_PER_SECOND,
        )
    yield compare("window: fetch-and-add", lambda: numbers.fetch_and_add(0, 1), {}, budget=budget, unit=Unit.PER_SECOND)


def _many_connections(budget: Budget) -> Iterator[Row | Note]:
    """Every call's time from its sending to its reply, with all of them under way."""
    allow_files()
    rpc.call(_CALLEE, allow_files)
    worker = current_worker()
    num_links = 100 if budget.is_quick else _NUM_CONNECTIONS
    before = rpc.call(_CALLEE, resident_bytes)
    links = [worker._links.connect(_CALLEE) for _ in range(num_links)]
    took_s: list[float] = []
    try:
        begun: list[tuple[Link, PendingCall, float]] = []
        for number in range(_CALLS_EACH * num_links):
            link = links[number % num_links]
            pending = PendingCall("echo", time.monotonic() + 60.0)
            begun.append((link, pending, time.perf_counter()))
            link.begin(CALL, TABLE.name_of(echo), [number], {}, pending)
        for number, (link, pending, start_s) in enumerate(begun):
            if link.wait(pending) != number:
                raise AssertionError(f"call {number} has another call's reply")
            took_s.append(time.perf_counter() - start_s)
        after = rpc.call(_CALLEE, resident_bytes)
    finally:
        for link in links:
            link.close()
    name = f"{num_links} connections, {_CALLS_EACH} calls under way on each: a call"
    yield Row(name=name, unit=Unit.SECONDS, ours=Measurement.of(took_s))
    p99 = sorted(took_s)[int(0.99 * len(took_s))]
    yield Note(
        text=f"{name}: all {len(took_s)} answered, p99 {1e3 * p99:.0f} ms from sending it to its reply; the callee took"
        f" {(after - before) / num_links / 1024:.0f} KB for each connection"
    )


def _join(name: str, rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its own calls
        torch_rpc.init_rpc(
            name,
            rank=rank,
            world_size=2,
            rpc_backend_options=torch_rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/torch"),
        )
    rpc.start(name, store=f"file://{folder}/ours")


@contextlib.contextmanager
def _callee(folder: str) -> Iterator[None]:
    """Both in a second process."""
    serve = f"from {__name__} import _serve; _serve({folder!r})"
    with subprocess.Popen([sys.executable, "-c", serve], cwd=ROOT) as process:
        try:
            yield
            process.wait(timeout=30)
        finally:
            process.kill()


_finished = threading.Event()


@rpc.expose
def _finish() -> None:
    _finished.set()


def _serve(folder: str) -> None:
    """In that process: take calls until the caller has measured."""
    _join(_CALLEE, 1, folder)
    _finished.wait(600)
    rpc.shutdown()
    torch_rpc.shutdown(graceful=False)


CASE = Case(
    title="Remote calls: one caller, one callee",
    about="""Two processes on one node, measured in turns. An echo is one call at a time, of a function that
    runs where the call is read (`inline=True`), or on a thread as torch's do; "computes" is a thread of the
    callee that multiplies matrices. Each process has one thread for its tensors, as under `torsh run`, and
    memcpy is one thread's. Pipelined calls are sent 200 at a time before the first result is taken. 64 MB are
    sent, and read by the callee; ours go through a memory file that is used again; memcpy is one copy within a
    process. Windows are memory of the callee, which is stopped by SIGSTOP meanwhile. The rivals are torch's RPC
    (TensorPipe), with its defaults, and gRPC (bytes, no schema). Ray's actors and MPI are not measured: each
    starts processes of its own, so they would not share the callee.""",
    rows=_rows,
)
