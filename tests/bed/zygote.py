"""A process that has already imported torch and forks worlds on request.

Why: importing torch takes over a second, and a suite starts hundreds of ranks. The zygote never
runs a test itself and never starts a thread; it forks a *runner* for each request, which
forks the ranks, watches their deadline, collects stacks of hung ranks, and replies with the outcomes.
They talk over a unix socket pair inherited from the test process.

Nothing outlives the test process, however that ends: the runner sees its socket close and kills the
ranks, the ranks die with the runner, and the runner, a subreaper, ends the processes that ranks started.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.bed.ports import free_port
from tests.lab.enter import Place, enter

_STACK_GRACE_S = 1.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` ends, even if it ended before this call.

    The kernel watches the thread that forked, so the parent must fork from a thread that lives on.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


@dataclass(frozen=True)
class Request:
    """One world to run: `function(*args)` on every rank."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    num_ranks: int
    backend: str | None
    timeout_s: float
    env: dict[str, str]
    places: tuple[Place, ...] = ()
    """The lab host of each rank; empty if all run on this machine."""
    imports: tuple[str, ...] = ()
    """Modules that the zygote imports first, and keeps: for libraries that take seconds to import on every rank."""


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
    pidfd: int
    folder: Path
    started: float
    exit_code: int | None = None
    ended: float = field(default=0.0)
    is_hung: bool = False
    is_stopped: bool = False


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


def _rank_environment(rank: int, request: Request, port: int) -> dict[str, str]:
    """The variables that a launcher would set for the rank on its host."""
    hosts = [place.name for place in request.places] or ["this machine"] * request.num_ranks
    mine = hosts[rank]
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": str(request.num_ranks),
        "LOCAL_RANK": str(hosts[:rank].count(mine)),
        "LOCAL_WORLD_SIZE": str(hosts.count(mine)),
        "GROUP_RANK": str(list(dict.fromkeys(hosts)).index(mine)),
        "MASTER_ADDR": request.places[0].address if request.places else "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return {**environment, **request.env}


def _run_rank(rank: int, request: Request, folder: Path, port: int) -> None:
    """In the rank's own process: set up, call the function, write the result to a file; never returns."""
    # Under nohup or in the background signals may be ignored, and children inherit that: reset them.
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    stacks = (folder / "stacks").open("w")
    faulthandler.enable(file=stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    os.environ.update(_rank_environment(rank, request, port))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    result: dict[str, Any]
    code = 0
    try:
        if request.places:
            enter(request.places[rank])
        if request.backend is not None:
            store = dist.FileStore(str(folder.parent / "store"), request.num_ranks)
            dist.init_process_group(request.backend, store=store, rank=rank, world_size=request.num_ranks)
            # Without this, a rank that fails at once could break the others while they are still connecting.
            store.set(f"ready/{rank}", "")
            store.wait([f"ready/{peer}" for peer in range(request.num_ranks)], timedelta(seconds=request.timeout_s))
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

    stacks = text("stacks")
    if entry.is_stopped:
        stacks = "stopped by a signal (SIGSTOP), so it could not show its stack\n" + stacks
    result: dict[str, Any] = {}
    with contextlib.suppress(FileNotFoundError, EOFError, pickle.UnpicklingError):
        result = pickle.loads((entry.folder / "result").read_bytes())
    return Outcome(
        rank=entry.rank,
        value=result.get("value"),
        error=result.get("error"),
        trace=result.get("trace", ""),
        exit_code=None if entry.is_hung else entry.exit_code,
        stacks=stacks,
        output=text("output"),
        duration_s=entry.ended - entry.started,
    )


def _collect(ranks: list[_Rank]) -> None:
    for entry in ranks:
        if entry.exit_code is None:
            pid, status = os.waitpid(entry.pid, os.WNOHANG)
            if pid:
                entry.exit_code = os.waitstatus_to_exitcode(status)
                entry.ended = time.monotonic()


def _reap(ranks: list[_Rank], deadline: float, *, client: socket.socket | None = None) -> None:
    """Wait until every rank has ended, the deadline passes, or the test process (`client`) is gone."""
    poller = select.poll()
    for entry in ranks:
        if entry.exit_code is None:
            poller.register(entry.pidfd, select.POLLIN)
    if client is not None:
        poller.register(client, select.POLLRDHUP)
    while any(entry.exit_code is None for entry in ranks):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return
        for fd, _ in poller.poll(left_s * 1000):
            if client is not None and fd == client.fileno():
                return
            poller.unregister(fd)
        _collect(ranks)


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _end_the_rest(ranks: list[_Rank]) -> None:
    """Ask the remaining ranks for their stacks, then kill them."""
    hung = [entry for entry in ranks if entry.exit_code is None]
    for entry in hung:
        entry.is_hung = True
        entry.is_stopped = _is_stopped(entry.pid)
        os.kill(entry.pid, signal.SIGUSR1)
    _reap(ranks, time.monotonic() + (_STACK_GRACE_S if hung else 0))
    for entry in ranks:
        if entry.exit_code is None:
            os.kill(entry.pid, signal.SIGKILL)
    _reap(ranks, time.monotonic() + 10)


def _kill_orphans() -> None:
    """End processes that ranks left running; as subreaper the runner is now their parent."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while orphans := [int(pid) for pid in children.read_text().split()]:
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
        for pid in orphans:
            os.waitpid(pid, 0)


def _run_world(request: Request, client: socket.socket) -> list[Outcome]:
    """In the runner: fork the ranks, wait, collect stacks of hung ranks, kill them, report."""
    runner = os.getpid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with tempfile.TemporaryDirectory(prefix="torsh-world-") as folder:
        port = free_port()
        ranks: list[_Rank] = []
        for rank in range(request.num_ranks):
            mine = Path(folder) / str(rank)
            mine.mkdir()
            started = time.monotonic()
            pid = os.fork()
            if pid == 0:
                try:
                    die_with_parent(runner)
                    client.close()
                    _run_rank(rank, request, mine, port)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(70)  # reached only if setup failed: the runner's code must not run here
            ranks.append(_Rank(rank, pid, os.pidfd_open(pid), mine, started))
        _reap(ranks, time.monotonic() + request.timeout_s, client=client)
        _end_the_rest(ranks)
        _kill_orphans()
        return [_outcome(entry) for entry in ranks]


def _serve(sock: socket.socket, request: Request, zygote: int) -> None:
    """In the runner's own process: run the world and reply; never returns."""
    die_with_parent(zygote)
    reply: object
    try:
        reply = _run_world(request, sock)
    except BaseException:
        reply = RuntimeError(f"the world's runner failed:\n{traceback.format_exc()}")
    # A test process that is gone needs no reply.
    with contextlib.suppress(BrokenPipeError):
        send(sock, reply)
    os._exit(0)


def _import_all(names: tuple[str, ...]) -> None:
    """Import modules into the zygote, for this world and all later ones; they must not start threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries' own code, as it is compiled
        for name in names:
            importlib.import_module(name)
    started = [(task / "comm").read_text().strip() for task in Path(f"/proc/{os.getpid()}/task").iterdir()]
    # The allocator in pyarrow's wheels for x86 has a thread that it gives up before a fork by itself.
    harmful = [name for name in started if name != "jemalloc_bg_thd"][1:]
    if harmful:
        raise RuntimeError(f"importing {', '.join(names)} started {len(harmful)} threads: {', '.join(harmful)}")


def main() -> None:
    """Serve requests until the test process goes away."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    for name in ("PYTHONMALLOC", "GLIBC_TUNABLES"):  # for this process alone, not for those that ranks start
        os.environ.pop(name, None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A process's first optimizer step imports torch._dynamo, which takes over a second. Data-parallel jobs do not
    # import the other strategies, which takes half a second per rank. Most worlds meet on our own backend.
    ours = (
        *("torsh_distributed", "torsh_distributed.train", "torsh_distributed.parallel.composed"),
        *("torsh_distributed.comm.backends.hierarchical.group", "torsh_distributed.train.checkpointing"),
    )
    heavy = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo", *ours)
    gc.disable()  # what is imported stays: to look for garbage in it takes a tenth of the time
    for module in ("torch.distributed",) if sys.argv[2] == "1" else heavy:
        importlib.import_module(module)
    # Otherwise the first collection in every rank writes to, and so copies, all the pages it shares with this process.
    gc.collect()
    gc.freeze()
    gc.enable()
    zygote = os.getpid()
    while True:
        try:
            request = receive(sock)
        except EOFError:
            os._exit(0)  # nothing to save, and unloading torch takes a second
        try:
            _import_all(request.imports)
        except Exception as error:
            send(sock, RuntimeError(f"the process that forks the ranks cannot import: {error}"))
            continue
        pid = os.fork()
        if pid == 0:
            _serve(sock, request, zygote)
        os.waitpid(pid, 0)
