"""The process that ranks of one node are forked from, whoever hosts them: imports torch once for all of them.

Run by path with a listening socket and a pipe as descriptors. A host connects, is told when torch is there, and sends
its rank's arguments, environment and directory, with its output and line as descriptors; it hears the rank's pid, and
in the end its exit code. The end of the pipe, of which the host that started this process has the other side, ends it;
ranks that were forked go on.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys

_MAX_MESSAGE_BYTES = 1 << 20
_ORDER_TIMEOUT_S = 10.0


def main() -> None:
    """Warm up, then fork a rank for each host that connects."""
    from torsh_distributed.launch.worker.spare import warm_up

    listener, owner = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    for fd in (listener.fileno(), owner):
        os.set_inheritable(fd, False)
    warm_up()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody collects the parents of ranks
    poller = select.poll()
    poller.register(owner, select.POLLIN)
    poller.register(listener.fileno(), select.POLLIN)
    while owner not in (fd for fd, _ in poller.poll()):
        host, _ = listener.accept()
        try:
            order = _take_order(host)
            if order is not None and _fork_rank(host, *order, ours=(listener.fileno(), owner)):
                return  # the rank's script came to its end
        finally:
            host.close()


def _take_order(host: socket.socket) -> tuple[dict[str, object], list[int]] | None:
    """The order of a host, with its descriptors; None from a host that is gone, or that is another user's."""
    from torsh_distributed.comm.trust.socket_peers import peer_uid

    if peer_uid(host) != os.geteuid():
        return None
    host.settimeout(_ORDER_TIMEOUT_S)
    try:
        host.send(b'{"type": "warm"}')
        data, fds, _, _ = socket.recv_fds(host, _MAX_MESSAGE_BYTES, 2)
    except OSError:
        return None
    return (json.loads(data), fds) if data else None


def _fork_rank(host: socket.socket, order: dict[str, object], fds: list[int], *, ours: tuple[int, int]) -> bool:
    """In this process: false. In the rank, after its script: true.

    Between them stays the rank's parent, which tells the host how the rank ended.
    """
    from torsh_distributed.launch.worker.spare import become_worker

    if os.fork() != 0:
        _close(fds)
        return False
    _close(ours)  # else ranks would hold the socket's name after this process
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    reading, writing = os.pipe()
    rank = os.fork()
    if rank == 0:
        os.setsid()
        _close([writing, reading])
        host.close()
        os.chdir(str(order["cwd"]))
        output, line = fds
        become_worker(order, [output, os.dup(output), line])
        return True
    _close([writing, *fds])
    os.read(reading, 1)  # ends when the rank leads its session
    _tell(host, {"pid": rank})
    _, status = os.waitpid(rank, 0)
    _tell(host, {"code": os.waitstatus_to_exitcode(status)})
    os._exit(0)


def _tell(host: socket.socket, message: dict[str, int]) -> None:
    try:
        host.send(json.dumps(message).encode())
    except OSError:
        return  # the host is gone; its guardian ends the rank


def _close(fds: tuple[int, ...] | list[int]) -> None:
    for fd in fds:
        os.close(fd)


if __name__ == "__main__":
    main()
