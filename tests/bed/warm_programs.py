"""The library's own commands, forked for tests from a process that has imported torch, instead of started.

Why: a test of a job starts a launcher, and that starts the process which its workers are forked from. Each imports for
seconds what every other one has imported before; a suite has hundreds of them. Here both are forks: `Program` is a
`subprocess.Popen` that takes them from the *nursery*, and any other command from where Popen takes it. The launcher
gets its spare from a process that was forked along with it and waits, so the spare's descendants come to the launcher,
as they do outside. What a test shows of the start itself it shows with `Started` and `--start-method spawn`.

Processes: the nursery forks a keeper for each program, and the keeper the program, whose end it tells. The nursery is a
subreaper, so what a job leaves behind stays below it, where `tests/bed/leaks.py` looks.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torsh_distributed.clusters.hosted.forked_rank import _READ_WHEN_LOADED
from torsh_distributed.elastic.faults.startup import install_faults

ROOT = Path(__file__).parents[2]
STARTUP = ROOT / "src" / "torsh_distributed" / "launch" / "worker" / "startup" / "sitecustomize.py"
COMMANDS = (
    "torsh_distributed.run",
    "torsh_distributed.cli.entry_point",
    "torsh_distributed.federated.simulation.client_processes",
    "tests.attacks.forging.hunt",
)
"""What is forked if it is started by `python -m`."""
_MAX_BYTES = 1 << 20
_MAX_FDS = 8
_PR_SET_CHILD_SUBREAPER = 36
_FAULTS = ("TORSH_FAULTS", "TORSH_FAULT_LOG")
"""Where one is set, faults are put in place once torch is imported: in a spare that is forked, at once."""
_NOT_COMPARED = frozenset(
    {
        "PYTHONPATH",
        "LD_LIBRARY_PATH",
        "TORCHINDUCTOR_CACHE_DIR",
        "PYTORCH_NVML_BASED_CUDA_CHECK",
        "KMP_DUPLICATE_LIB_OK",
        "KMP_INIT_AT_FORK",
    }
)
"""The first two are heeded; imports set the others in the test process."""


class Nursery:
    """This process's end of the process that programs are forked from; started when it is first needed."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()

    def start(self, order: dict[str, object], fds: list[int]) -> None:
        """Fork a program; its pid and its status come through the last descriptor."""
        with self._lock:
            if self._socket is None:
                self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                # Few and large pages, as in the bed's zygote: a fork copies the table of them.
                env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONMALLOC": "malloc"}
                env["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
                with theirs:
                    self.process = Started(
                        [
                            sys.executable,
                            "-u",
                            "-c",
                            "from tests.bed.warm_programs import main; main()",
                            str(theirs.fileno()),
                        ],
                        pass_fds=[theirs.fileno()],
                        cwd=ROOT,
                        env=env,
                        stdin=subprocess.DEVNULL,
                    )
                atexit.register(self.close)
            socket.send_fds(self._socket, [json.dumps(order).encode()], fds)

    def close(self) -> None:
        """End it; programs go on to their own end."""
        if self._socket is not None and self.process is not None:
            self._socket.close()
            self._socket = None
            self.process.wait(10)


Started = subprocess.Popen
"""What starts an interpreter for these commands too."""
NURSERY = Nursery()


class Program(subprocess.Popen[Any]):
    """A process of one of COMMANDS, forked; all of Popen's methods work on it."""

    _status: int | None = None
    _reports: socket.socket | None = None

    def _execute_child(self, args: Any, executable: Any, *rest: Any) -> None:
        (preexec_fn, _, pass_fds, cwd, env, _, _, shell), pipes, user = rest[:8], rest[8:14], rest[15:18]
        is_plain = not (shell or executable or preexec_fn or any(user)) and isinstance(args, list)
        words = list(map(os.fspath, args)) if is_plain else []
        env = dict(os.environ if env is None else env)
        if words[:2] != [sys.executable, "-m"] or words[2] not in COMMANDS or not _can_be_forked(env):
            super()._execute_child(args, executable, *rest)  # type: ignore[misc]  # Popen's own
            return
        p2cread, _, _, c2pwrite, _, errwrite = pipes
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        standard = [number if pipe == -1 else pipe for number, pipe in enumerate((p2cread, c2pwrite, errwrite))]
        order = {"words": words[2:], "env": env, "cwd": os.fspath(cwd or Path.cwd()), "is_leader": rest[-2] is True}
        order["passed"] = list(pass_fds)
        with theirs:
            NURSERY.start(order, [*standard, *pass_fds, theirs.fileno()])
        self.pid = json.loads(ours.recv(_MAX_BYTES))["pid"]
        self._reports = ours
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]  # Popen's own

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._reports is None:
            found: tuple[int, int] = super()._try_wait(wait_flags)  # type: ignore[misc]  # Popen's own
            return found
        if self._status is None:
            if wait_flags & os.WNOHANG and not select.select([self._reports], [], [], 0)[0]:
                return 0, 0
            told = self._reports.recv(_MAX_BYTES)
            self._status = json.loads(told)["status"] if told else signal.SIGKILL
            self._reports.close()
        return self.pid, self._status

    def _internal_poll(self, *rest: Any, **options: Any) -> int | None:
        if self._reports is None:
            code: int | None = super()._internal_poll(*rest, **options)  # type: ignore[misc]  # Popen's own
            return code
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]  # Popen's own
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid == self.pid:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]  # Popen's own
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]  # Popen's own
        return self.returncode


def _read_when_loaded(env: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in env.items() if k.startswith(_READ_WHEN_LOADED) and k not in _NOT_COMPARED}


_AT_START = _read_when_loaded(os.environ)


def _can_be_forked(env: Mapping[str, str]) -> bool:
    """Whether the program would find with these variables what the nursery has found when it was loaded."""
    return _read_when_loaded(env) in (_AT_START, {**_AT_START, "OMP_NUM_THREADS": "1"})  # the nursery's own


def main() -> None:
    """The nursery: import what programs need, then fork one for each order until the test process is gone."""
    orders = socket.socket(fileno=int(sys.argv[1]))
    orders.set_inheritable(False)
    from torsh_distributed.launch.worker import spare

    spare.warm_up()
    importlib.import_module("torsh_distributed.cli.app")
    gc.collect()
    gc.freeze()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    while True:
        data, fds, _, _ = socket.recv_fds(orders, _MAX_BYTES, _MAX_FDS)
        if not data:
            os._exit(0)  # nothing to save, and unloading torch takes a second
        if os.fork() == 0:
            orders.close()
            if _keep(json.loads(data), fds):
                return  # a worker's script came to its end
        for fd in fds:
            os.close(fd)


def _keep(order: dict[str, Any], fds: list[int]) -> bool:
    """In the keeper: fork the program and tell its end. In a worker of it: true, after its script."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *given, report = fds
    pid = os.fork()
    if pid == 0:
        os.close(report)
        return _be_program(order, given)
    reports = socket.socket(fileno=report)
    for fd in given:
        os.close(fd)
    with contextlib.suppress(OSError):  # the test process may be gone
        reports.send(json.dumps({"pid": pid}).encode())
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        reports.send(json.dumps({"status": status}).encode())
    os._exit(0)


def _be_program(order: dict[str, Any], given: list[int]) -> bool:
    """Be what `python -m WORDS` would be; in a worker of it: true, after its script."""
    # First out of the way of each other: the number that one shall have may be another's.
    highest = max(given + order["passed"]) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, highest) for fd in given]
    for fd in given:
        os.close(fd)
    for number, fd in zip([*range(3), *order["passed"]], moved, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if order["is_leader"]:
        os.setsid()
    os.chdir(order["cwd"])
    take_environment(order["env"])
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        return _be_spare(theirs)
    theirs.close()
    _give_spare(ours)
    from torsh_distributed.launch.worker import worker_start

    code = 0
    try:
        worker_start._run_module(order["words"][0], order["words"][1:])
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # what an interpreter does at its end
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # unloading torch takes a second


def take_environment(env: dict[str, str]) -> None:
    """Have these variables instead of the nursery's, as far as an interpreter reads them when it starts, too."""
    for folder in set(env.get("LD_LIBRARY_PATH", "").split(":")) - set(
        os.environ.get("LD_LIBRARY_PATH", "").split(":")
    ):
        for library in Path(folder).glob("*.so*"):
            ctypes.CDLL(str(library))  # found by its name from now on, wherever it lies
    os.environ.clear()
    os.environ.update(env)
    for place in reversed(env.get("PYTHONPATH", "").split(os.pathsep)):
        if place and place not in sys.path:
            sys.path.insert(1, place)


def _give_spare(way: socket.socket) -> None:
    """The first spare that this launcher starts is the process at the other end of `way`."""
    from torsh_distributed.launch.worker import spare

    start = spare.start_spare

    def start_spare(env: Any, *, listener: socket.socket | None = None) -> tuple[Any, socket.socket]:
        spare.start_spare = start
        if listener is not None:
            return start(env, listener=listener)
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with way, theirs:
            socket.send_fds(way, [json.dumps(dict(env)).encode()], [theirs.fileno()])
            return _Spare(json.loads(way.recv(_MAX_BYTES))), control

    spare.start_spare = start_spare


class _Spare:
    """What a launcher uses of a spare's Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float) -> None:
        from torsh_distributed.launch.control.spare_process import ForkedWorker

        ForkedWorker(self.pid).wait(timeout)


def _be_spare(way: socket.socket) -> bool:
    """Wait until the launcher wants a spare, and be it; in a worker that it forked: true, after its script."""
    from torsh_distributed.launch.worker import spare

    data, fds, _, _ = socket.recv_fds(way, _MAX_BYTES, 1)
    if not data:
        os._exit(0)
    own = os.getpid()
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    env = json.loads(data)
    take_environment(env)
    place = importlib.util.spec_from_file_location("sitecustomize", STARTUP)
    assert place is not None, "a Python file has a place"
    assert place.loader is not None, "a Python file has a loader"
    place.loader.exec_module(importlib.util.module_from_spec(place))
    if any(env.get(name) for name in _FAULTS):
        install_faults()
    way.send(json.dumps(own).encode())
    way.close()
    sys.argv = [spare.__file__, str(fds[0])]
    spare.main()
    if os.getpid() == own:
        os._exit(0)
    return True
