"""Accepts connections for a server, each on a thread of its own; those that have not joined are few, and go soon."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable

from torsh_distributed.comm.trust.stranger_pool import StrangerPool
from torsh_distributed.errors import first_line

_log = logging.getLogger(__name__)
JOIN_S = 10.0
"""For each message until a device has joined."""
_WITHOUT_FILES_S = 0.5
_MOST_STRANGERS = 64


class DeviceListener:
    """Listens until it is closed."""

    def __init__(
        self, address: tuple[str, int], context: ssl.SSLContext, serve: Callable[[ssl.SSLSocket], None]
    ) -> None:
        """`serve` has the connection from its handshake to its end, and may raise OSError."""
        self._context = context
        self._serve = serve
        self._changed = threading.Condition()
        self._is_closed = False
        self._sockets: set[ssl.SSLSocket] = set()
        self._strangers: StrangerPool[ssl.SSLSocket] = StrangerPool(_MOST_STRANGERS)
        """Those of them that have not joined."""
        self._threads: set[threading.Thread] = set()
        self._listening = socket.create_server(address)
        self.address: tuple[str, int] = self._listening.getsockname()[:2]

    def begin(self) -> None:
        """Accept from now on."""
        self._start(self._accept)

    def has_joined(self, sock: ssl.SSLSocket) -> None:
        """It is a device's: no newcomer costs it its place any more."""
        with self._changed:
            if sock in self._strangers:
                self._strangers.release(sock)

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                plain, address = self._listening.accept()
                plain.settimeout(JOIN_S)
                sock = self._context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
            except OSError as error:  # closed, or it left before it was accepted
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    _log.warning("no more files can be opened: raise the limit (`ulimit -n`), two for each device")
                    with self._changed:
                        self._changed.wait_for(lambda: self._is_closed, _WITHOUT_FILES_S)
                continue
            with self._changed:
                self._sockets.add(sock)
                evicted = self._strangers.admit(sock, address[0])
            if evicted is not None:
                _cut(evicted)
            self._start(self._serve_one, sock)

    def _serve_one(self, sock: ssl.SSLSocket) -> None:
        try:
            self._serve(sock)
        except OSError as error:
            _log.info("a connection ended: %s", first_line(error))
        finally:
            with self._changed:
                self._sockets.discard(sock)
                if sock in self._strangers:
                    self._strangers.refuse(sock, "it did not join")
                    self._report(time.monotonic())
            sock.close()

    def _report(self, now_s: float) -> None:
        """One line about all who were refused, at most once a minute."""
        due_s = self._strangers.summary_due_s(now_s)
        if due_s is not None and due_s <= now_s:
            _log.warning("%s", self._strangers.summary(now_s))

    def _start(self, target: Callable[..., None], *args: ssl.SSLSocket) -> None:
        def run() -> None:
            try:
                target(*args)
            finally:
                with self._changed:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name="federated-server", daemon=True)
        with self._changed:
            self._threads.add(thread)
        thread.start()

    def close(self) -> None:
        """End all connections, and wait for their threads."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        with self._changed:
            sockets, threads = list(self._sockets), list(self._threads)
        for sock in sockets:
            _cut(sock)
        deadline_s = time.monotonic() + JOIN_S
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))


def _cut(sock: ssl.SSLSocket) -> None:
    """Its thread is woken with an error."""
    with contextlib.suppress(OSError):  # the other end was first
        # Of the socket itself: TLS's own would let a later call go on in the clear.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
