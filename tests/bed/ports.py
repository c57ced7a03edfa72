"""Ports that stay free from the moment a test chooses one to the moment something listens on it."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

_FIRST = 10_000
_COUNTER = "torsh-test-port"


def free_port() -> int:
    """A port on loopback that neither the kernel nor another test of this user gives away meanwhile.

    Why not the one that the kernel chooses for port 0: once that socket is closed, it may give the number to any other
    process, and on a busy machine it does. This one is below the range the kernel chooses from, and a counter in a file
    that the processes of a run share takes each number once in many thousands.
    """
    numbers = range(_FIRST, int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]))
    if len(numbers) < 1000:  # a machine whose kernel chooses from nearly all ports
        return _listening_port(0)
    counter = os.open(Path(tempfile.gettempdir()) / f"{_COUNTER}-{os.getuid()}", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(counter, fcntl.LOCK_EX)  # until it is closed
        last = int(os.pread(counter, 20, 0) or random.choice(numbers))
        for step in range(1, len(numbers)):
            try:
                port = _listening_port(numbers[(last + step - _FIRST) % len(numbers)])
            except OSError:  # somebody listens there
                continue
            os.pwrite(counter, b"%-10d" % port, 0)
            return port
    finally:
        os.close(counter)
    raise OSError(f"no free port in {numbers}")


def _listening_port(port: int) -> int:
    with socket.create_server(("127.0.0.1", port)) as listener:
        return int(listener.getsockname()[1])
