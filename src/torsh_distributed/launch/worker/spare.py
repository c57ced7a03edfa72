"""The process of the warm spare: imports torch, then forks a worker for each order of the launcher.

Run by path, as `worker_start` is. An order is the worker's arguments and environment, with its stdout, its stderr and
its line as descriptors; the answer is the worker's pid. The worker is forked twice, so it becomes the launcher's child.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - as in worker_start
_MAX_MESSAGE_BYTES = 1 << 20
_PRELOADED = (
    "torch",
    "torch.distributed",
    "torsh_distributed.launch.worker.init",
)


def main() -> None:
    """Warm up, then serve until the launcher closes its end."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    warm_up()
    control.send(b'{"type": "warm"}')
    while True:
        data, fds, _, _ = socket.recv_fds(control, _MAX_MESSAGE_BYTES, 3)
        if not data:
            return
        pid = _fork_worker(control, json.loads(data), fds)
        if pid == 0:
            return  # the worker's script came to its end
        for fd in fds:
            os.close(fd)
        control.send(json.dumps({"pid": pid}).encode())


def warm_up() -> None:
    """Ignore signals that are meant for workers, and import what every worker needs."""
    import importlib

    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    from torsh_distributed.upward import PRELOADED

    for name in (*_PRELOADED, *PRELOADED):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so a worker's collections do not copy the pages they share


def _fork_worker(control: socket.socket, order: dict[str, object], fds: list[int]) -> int:
    """In the spare: the worker's pid. In the worker, after its script: 0."""
    reading, writing = os.pipe()
    helper = os.fork()
    if helper == 0:
        if os.fork() != 0:
            os._exit(0)
        os.setsid()
        os.close(reading)
        os.write(writing, str(os.getpid()).encode())
        os.close(writing)
        control.close()
        become_worker(order, fds)
        return 0
    os.close(writing)
    # Until the helper is gone, the worker is not the launcher's child.
    os.waitpid(helper, 0)
    text = os.read(reading, 32)
    os.close(reading)
    return int(text)


def become_worker(order: dict[str, object], fds: list[int]) -> None:
    """In the forked process: take over the worker's output, line, environment and arguments, and run its script."""
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
