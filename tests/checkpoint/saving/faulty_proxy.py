"""A proxy in front of a server that cuts connections in the middle of what clients send."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Self


class FaultyProxy:
    """Forwards connections to `target`; the next `failures` requests of more than `after_bytes` end right there."""

    def __init__(self, target: tuple[str, int], *, failures: int = 0, after_bytes: int = 0) -> None:
        self._target = target
        self._lock = threading.Lock()
        self.failures, self._after_bytes = failures, after_bytes
        self.num_cut = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._sockets:
            _cut(sock)
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
            except OSError:
                return
            self._sockets += [client, server]
            for source, sink, is_upload in ((client, server, True), (server, client, False)):
                thread = threading.Thread(target=self._forward, args=(source, sink, is_upload))
                self._threads.append(thread)
                thread.start()

    def _forward(self, source: socket.socket, sink: socket.socket, is_upload: bool) -> None:
        passed = 0
        with suppress(OSError):
            while data := source.recv(1 << 16):
                passed += len(data)
                if is_upload and passed > self._after_bytes and self._takes_a_failure():
                    break
                sink.sendall(data)
                if not is_upload:
                    continue
        _cut(source)
        _cut(sink)

    def _takes_a_failure(self) -> bool:
        with self._lock:
            if not self.failures:
                return False
            self.failures -= 1
            self.num_cut += 1
            return True


def _cut(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
