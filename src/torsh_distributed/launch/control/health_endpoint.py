"""`torsh run --health HOST:PORT`: two pages for probes of Kubernetes and load balancers, served by the launcher's loop.

`/healthz` says that the loop turns; `/readyz` that all workers of this node run, with status 503 until they do and once
the job is ending. Nothing else is told and nothing can be asked for, so it needs no token.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from functools import partial
from typing import Self

from torsh_distributed.errors import IoError
from torsh_distributed.launch.local.loop import Loop, Timer

_MAX_REQUEST_BYTES = 4096
_MAX_ASKERS = 16
_LIMIT_S = 2.0
_REASONS = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}

CountWorkers = Callable[[], tuple[int, int]]
"""Workers of this node that run, and how many there should be."""


class HealthEndpoint:
    """Answers while the loop runs; few askers at once, each for a short time."""

    def __init__(self, loop: Loop, host: str, port: int, count: CountWorkers) -> None:
        self._loop = loop
        self._count = count
        self._askers: dict[socket.socket, Timer] = {}
        self._requests: dict[socket.socket, bytes] = {}
        self._listener = _listen(host, port)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        loop.watch(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            asker, _ = self._listener.accept()
        except OSError:  # it left again
            return
        if len(self._askers) >= _MAX_ASKERS:
            self._drop(next(iter(self._askers)))  # the oldest has had its time
        asker.setblocking(False)
        self._requests[asker] = b""
        self._askers[asker] = self._loop.call_later(_LIMIT_S, partial(self._drop, asker))
        self._loop.watch(asker.fileno(), partial(self._read, asker))

    def _read(self, asker: socket.socket) -> None:
        try:
            data = asker.recv(_MAX_REQUEST_BYTES)
            self._requests[asker] += data
            request = self._requests[asker]
            if data and b"\r\n\r\n" not in request and len(request) < _MAX_REQUEST_BYTES:
                return
            if b"\r\n" in request:
                # Short enough for the socket's buffer, so it is taken at once.
                asker.send(self._answer(request.partition(b"\r\n")[0]))
        except BlockingIOError:
            return
        except OSError:
            pass  # the asker is gone; it is dropped as one that was answered
        self._drop(asker)

    def _answer(self, line: bytes) -> bytes:
        method, _, rest = line.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        running, wanted = self._count()
        status = {b"/healthz": 200, b"/readyz": 200 if running >= wanted else 503}.get(path, 404)
        if method not in (b"GET", b"HEAD"):
            status = 405
        body = json.dumps({"workers": running, "of": wanted}).encode() + b"\n" if status in (200, 503) else b""
        head = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
        return head.encode() + (body if method != b"HEAD" else b"")

    def _drop(self, asker: socket.socket) -> None:
        timer = self._askers.pop(asker, None)
        if timer is not None:
            timer.cancel()
            del self._requests[asker]
            self._loop.unwatch(asker.fileno())
            asker.close()

    def close(self) -> None:
        """Stop answering."""
        for asker in list(self._askers):
            self._drop(asker)
        self._loop.unwatch(self._listener.fileno())
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_MAX_ASKERS)
    except OSError as error:
        raise IoError(
            f"the pages for probes cannot listen on {host}:{port}: {error.strerror or error}",
            hint="--health takes an address of this node and a free port",
            host=host,
            port=port,
        ) from error
