"""The warm spare: a process that imports torch once, and forks a worker for each order of those that connect to it.

Run by path with descriptors: a socket of the one that started it (its owner), and a listening socket if others may
order too. Each hears when torch is there. An order (`order_worker`) is the worker's arguments, environment and
directory with its stdout, its stderr and its line as descriptors; the answer is the worker's pid. The end of the
owner's socket ends this process; workers go on.

A worker is forked twice. If its owner is to adopt it, as a launcher that is a subreaper does, the process in between
ends at once. Otherwise it stays, and tells the client how the worker ended.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence

_FOLDER = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - as in worker_start
MAX_MESSAGE_BYTES = 1 << 20
_PRELOADED = (
    "torch",
    "torch.distributed",
    "torch._dynamo",  # any optimizer of torch imports it, and no worker is to do so once more
    "torsh_distributed.launch.worker.init",
)


def start_spare(
    env: Mapping[str, str], *, listener: socket.socket | None = None
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """In its owner: the process, which has begun to import, and the owner's end of its socket. Raises OSError."""
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fds = [one.fileno() for one in (theirs, listener) if one is not None]
    with theirs:
        try:
            process = subprocess.Popen(
                [sys.executable, "-u", __file__, *map(str, fds)],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=fds,
            )
        except BaseException:
            control.close()
            raise
    return process, control


def order_worker(
    spare: socket.socket,
    argv: Sequence[str],
    env: Mapping[str, str],
    fds: tuple[int, int, int],
    *,
    cwd: str,
    is_adopted: bool,
) -> int:
    """In a client, once it has heard that the spare is warm: the pid of a new worker.

    Raises OSError if the spare ends over it. `fds`: stdout, stderr, the line.
    """
    order = {"argv": list(argv), "env": dict(env), "cwd": cwd, "is_adopted": is_adopted}
    socket.send_fds(spare, [json.dumps(order).encode()], fds)
    told = spare.recv(MAX_MESSAGE_BYTES)
    if not told:
        raise ConnectionResetError("the process that forks workers ended while it started this one")
    return int(json.loads(told)["pid"])


def main() -> None:
    """Warm up, then serve until the owner closes its end."""
    owner = socket.socket(fileno=int(sys.argv[1]))
    listener = socket.socket(fileno=int(sys.argv[2])) if len(sys.argv) > 2 else None
    for one in (owner, listener):
        if one is not None:
            one.set_inheritable(False)
    warm_up()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody collects the parents of workers
    _tell(owner, {"type": "warm"})
    clients = {owner.fileno(): owner}
    poller = select.poll()
    for fd in (owner.fileno(), *(() if listener is None else (listener.fileno(),))):
        poller.register(fd, select.POLLIN)
    while True:
        for fd, _ in poller.poll():
            if listener is not None and fd == listener.fileno():
                client = _accept(listener)
                if client is not None:
                    clients[client.fileno()] = client
                    poller.register(client.fileno(), select.POLLIN)
                continue
            order, fds = _take_order(clients[fd])
            if order is not None and _fork_worker(clients, fd, order, fds, listener):
                return  # the worker's script came to its end
            if order is None and fd == owner.fileno():
                return
            if order is None or not order["is_adopted"]:
                # Only the worker's parent still has this connection, so the client sees the end of that one.
                poller.unregister(fd)
                clients.pop(fd).close()


def _accept(listener: socket.socket) -> socket.socket | None:
    """A client that was told that torch is there; None if it is another user's."""
    from torsh_distributed.comm.trust.job_secret import peer_uid

    client, _ = listener.accept()
    if peer_uid(client) != os.geteuid():
        client.close()
        return None
    _tell(client, {"type": "warm"})
    return client


def _take_order(client: socket.socket) -> tuple[dict[str, object] | None, list[int]]:
    """An order with its descriptors; None from a client that is gone."""
    try:
        data, fds, _, _ = socket.recv_fds(client, MAX_MESSAGE_BYTES, 3)
    except OSError:
        return None, []
    return (json.loads(data), fds) if data else (None, [])


def _fork_worker(
    clients: Mapping[int, socket.socket],
    fd: int,
    order: dict[str, object],
    fds: list[int],
    listener: socket.socket | None,
) -> bool:
    """In the spare: false. In the worker, after its script: true."""
    client, is_adopted = clients[fd], bool(order["is_adopted"])
    reading, writing = os.pipe()
    between = os.fork()
    if between != 0:
        os.close(writing)
        if is_adopted:
            _wait_for(between)  # until it is gone, the worker is not the owner's child
            _tell(client, {"pid": int(os.read(reading, 32))})
        _close([reading, *fds])
        return False
    # Else these would hold the name of the socket and the ends of others' connections after the spare.
    for one in (*clients.values(), *(() if listener is None else (listener,))):
        if one is not client:
            one.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    own = os.pidfd_open(os.getpid())
    worker = os.fork()
    if worker == 0:
        os.setsid()
        os.write(writing, str(os.getpid()).encode())
        if is_adopted:
            select.select([own], [], [])  # only when its parent has ended does the script find the owner as its parent
        _close([reading, writing, own])
        client.close()
        become_worker(order, fds)
        return True
    if not is_adopted:
        _close(fds)
        os.read(reading, 32)  # the worker leads its session now
        _tell(client, {"pid": worker})
        _, status = os.waitpid(worker, 0)
        _tell(client, {"code": os.waitstatus_to_exitcode(status)})
    os._exit(0)


def _wait_for(pid: int) -> None:
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        return  # it has ended, and SIGCHLD is ignored


def _tell(client: socket.socket, message: Mapping[str, object]) -> None:
    try:
        client.send(json.dumps(message).encode())
    except OSError:
        return  # the client is gone; its guardian ends the worker


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def warm_up() -> None:
    """Ignore signals that are meant for workers, and import what every worker needs."""
    import importlib

    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    from torsh_distributed.upward import PRELOADED

    gc.disable()  # what is imported stays: looking for garbage in it is a tenth of the time
    for name in (*_PRELOADED, *PRELOADED):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so a worker's collections do not copy the pages they share
    gc.enable()


def become_worker(order: dict[str, object], fds: list[int]) -> None:
    """In the forked process: take over the worker's output, line, directory, environment and arguments, and run it."""
    os.chdir(str(order["cwd"]))
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    stdout, stderr, line = fds
    for fd, standard in ((stdout, 1), (stderr, 2)):
        os.dup2(fd, standard)
        os.close(fd)
    env, argv = order["env"], order["argv"]
    assert isinstance(env, dict), "the launcher sends it"
    assert isinstance(argv, list), "the launcher sends it"
    os.environ.clear()
    os.environ.update(env)
    os.environ["TORSH_LINE_FD"] = str(line)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # else every worker draws the same numbers
    sys.argv = [os.path.join(_FOLDER, "worker_start.py"), *argv]  # noqa: PTH118
    import importlib

    start = importlib.import_module("torsh_distributed.launch.worker.worker_start")
    start.main()


if __name__ == "__main__":
    main()
