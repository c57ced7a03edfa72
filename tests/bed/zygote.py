"""A process that has torch imported already and forks worlds on request.

Why: importing torch costs over a second, and a suite starts hundreds of ranks. The zygote never
runs a test itself and never starts a thread; each request is served by a forked *runner*, which
forks the ranks, watches their deadline, collects stacks of the hung, and replies with the outcomes.
Protocol: over a unix socket pair inherited from the test process, both ends ours.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_STACK_GRACE_S = 1.0


@dataclass(frozen=True)
class Request:
    """One world to run: `function(*args)` on every rank."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    num_ranks: int
    backend: str | None
    timeout_s: float
    env: dict[str, str]


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: with a value, an exception, a signal, an exit code, or not at all."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    exit_code: int | None = None
    """As in subprocess: negative for a signal; None if the rank hung and had to be killed."""
    stacks: str = ""
    output: str = ""
    duration_s: float = 0.0

    @property
    def is_ok(self) -> bool:
        """Whether the function returned."""
        return self.exit_code == 0 and self.error is None


@dataclass
class _Rank:
    rank: int
    pid: int
    folder: Path
    started: float
    exit_code: int | None = None
    ended: float = field(default=0.0)
    is_hung: bool = False


def send(sock: socket.socket, value: Any) -> None:
    """Write one length-prefixed pickle."""
    data = pickle.dumps(value)
    sock.sendall(struct.pack("!Q", len(data)) + data)


def receive(sock: socket.socket) -> Any:
    """Read one length-prefixed pickle; raises EOFError when the other end is gone."""
    (size,) = struct.unpack("!Q", _read(sock, 8))
    return pickle.loads(_read(sock, size))


def _read(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(min(1 << 20, size - len(data)))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def free_port() -> int:
    """A port on loopback that nobody listens on just now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _run_rank(rank: int, request: Request, folder: Path, port: int) -> None:
    """In the rank's own process: set up, call the function, leave the result in a file, never return."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    stacks = (folder / "stacks").open("w")
    faulthandler.enable(file=stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(request.num_ranks),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(request.num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        **request.env,
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    result: dict[str, Any]
    code = 0
    try:
        if request.backend is not None:
            store = dist.FileStore(str(folder.parent / "store"), request.num_ranks)
            dist.init_process_group(request.backend, store=store, rank=rank, world_size=request.num_ranks)
        result = {"value": request.function(*request.args)}
        if request.backend is not None and dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as error:
        result = {"error": error, "trace": traceback.format_exc()}
        code = 1
    try:
        data = pickle.dumps(result)
    except Exception as error:
        shown = result.get("trace") or repr(result.get("value"))[:200]
        data = pickle.dumps({"error": TypeError(f"the rank's result does not pickle: {error}"), "trace": shown})
        code = 1
    (folder / "result").write_bytes(data)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _outcome(entry: _Rank) -> Outcome:
    def text(name: str) -> str:
        path = entry.folder / name
        return path.read_text(errors="replace") if path.exists() else ""

    result: dict[str, Any] = {}
    with contextlib.suppress(FileNotFoundError, EOFError, pickle.UnpicklingError):
        result = pickle.loads((entry.folder / "result").read_bytes())
    return Outcome(
        rank=entry.rank,
        value=result.get("value"),
        error=result.get("error"),
        trace=result.get("trace", ""),
        exit_code=None if entry.is_hung else entry.exit_code,
        stacks=text("stacks"),
        output=text("output"),
        duration_s=entry.ended - entry.started,
    )


def _reap(ranks: list[_Rank], deadline: float) -> None:
    while any(entry.exit_code is None for entry in ranks) and time.monotonic() < deadline:
        _collect(ranks)
        time.sleep(0.002)


def _collect(ranks: list[_Rank]) -> None:
    for entry in ranks:
        if entry.exit_code is None:
            pid, status = os.waitpid(entry.pid, os.WNOHANG)
            if pid:
                entry.exit_code = os.waitstatus_to_exitcode(status)
                entry.ended = time.monotonic()


def _run_world(request: Request) -> list[Outcome]:
    """In the runner: fork the ranks, wait, gather stacks of the hung, kill them, report."""
    with tempfile.TemporaryDirectory(prefix="torsh-world-") as folder:
        port = free_port()
        ranks: list[_Rank] = []
        for rank in range(request.num_ranks):
            mine = Path(folder) / str(rank)
            mine.mkdir()
            started = time.monotonic()
            pid = os.fork()
            if pid == 0:
                _run_rank(rank, request, mine, port)
            ranks.append(_Rank(rank, pid, mine, started))
        _reap(ranks, time.monotonic() + request.timeout_s)
        hung = [entry for entry in ranks if entry.exit_code is None]
        for entry in hung:
            entry.is_hung = True
            os.kill(entry.pid, signal.SIGUSR1)
        _reap(ranks, time.monotonic() + (_STACK_GRACE_S if hung else 0))
        for entry in ranks:
            if entry.exit_code is None:
                os.kill(entry.pid, signal.SIGKILL)
        _reap(ranks, time.monotonic() + 10)
        return [_outcome(entry) for entry in ranks]


def main() -> None:
    """Serve requests until the test process goes away."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in ("torch.distributed.fsdp", "torch.distributed.tensor", "torsh_distributed"):
        importlib.import_module(module)
    while True:
        try:
            request = receive(sock)
        except EOFError:
            return
        pid = os.fork()
        if pid == 0:
            try:
                send(sock, _run_world(request))
            except BaseException:
                send(sock, RuntimeError(f"the world's runner failed:\n{traceback.format_exc()}"))
            os._exit(0)
        os.waitpid(pid, 0)
