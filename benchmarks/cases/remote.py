"""Remote calls between two processes: ours against torch's RPC."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed.rpc as torch_rpc

from benchmarks.harness import Budget, Case, Note, Row, Unit, compare
from benchmarks.machine import ROOT
from torsh_distributed import rpc

_CALLEE = "callee"
_NUM_PIPELINED = 200
_PAYLOAD_BYTES = 64 << 20


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

    yield row("echo of 4 bytes", lambda: rpc.call(_CALLEE, echo, (small,)), theirs)
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


def _join(name: str, rank: int, folder: str) -> None:
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
    about="""Two processes on one node, measured in turns. An echo is one call at a time, of a function that runs where
    the call is read (`inline=True`), or on a thread as torch's do; "computes" is a thread of the callee that multiplies
    matrices. Pipelined calls are sent 200 at a time before the first result is taken. 64 MB are sent, and read by the
    callee; ours go through a sealed memory file; memcpy is one copy within a process. The rival is torch's RPC
    (TensorPipe), with its defaults.""",
    rows=_rows,
)
