"""Accepts the connections of a job: who proves the secret is passed on, strangers are few and go soon."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence

from torsh_distributed.comm.transport.event_loop import EventLoop
from torsh_distributed.comm.transport.proof import ProvedSocket, prove, tls_beyond
from torsh_distributed.comm.trust.job_secret import peer_name
from torsh_distributed.comm.trust.stranger_pool import PROOF_TIMEOUT_S, StrangerPool

_log = logging.getLogger(__name__)
_MOST_STRANGERS = 64
_WITHOUT_FILES_S = 0.5


class Listener:
    """Proves each connection on a thread of its own, which ends within seconds, and calls `admit` with it."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        secret: bytes,
        protocol: bytes,
        *,
        loop: EventLoop,
        admit: Callable[[ProvedSocket], None],
    ) -> None:
        """Takes the sockets over. `admit` runs on the thread that proved; it takes the connection over."""
        self._sockets = list(sockets)
        self._secret = secret
        self._protocol = protocol
        self._loop = loop
        self._admit = admit
        self._lock = threading.Lock()
        self._strangers: StrangerPool[socket.socket] = StrangerPool(_MOST_STRANGERS)
        self._threads: set[threading.Thread] = set()
        self._is_closed = False
        for sock in self._sockets:
            sock.setblocking(False)
        self._watch(select.EPOLLIN)

    def _watch(self, mask: int) -> None:
        for sock in self._sockets:
            self._loop.watch(sock.fileno(), mask, lambda _, sock=sock: self._accept(sock))  # type: ignore[misc]

    def _accept(self, listening: socket.socket) -> None:
        try:
            sock, _ = listening.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                _log.warning("no more files can be opened: raise the limit (`ulimit -n`), two for each peer")
                self._watch(0)
                self._loop.call_at(time.monotonic() + _WITHOUT_FILES_S, self._accept_again)
            return  # otherwise no more of them, or it left before it was accepted
        thread = threading.Thread(target=self._prove, args=(sock,), name="proof-of-secret", daemon=True)
        with self._lock:
            if self._is_closed:
                sock.close()
                return
            evicted = self._strangers.admit(sock, peer_name(sock))
            self._threads.add(thread)
        if evicted is not None:
            with contextlib.suppress(OSError):  # it has left by itself
                evicted.shutdown(socket.SHUT_RDWR)  # its thread is woken with an error, and reports it
        thread.start()

    def _accept_again(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._watch(select.EPOLLIN)

    def _prove(self, sock: socket.socket) -> None:
        try:
            proved = prove(
                sock, self._secret, self._protocol, is_server=True, timeout_s=PROOF_TIMEOUT_S, tls=tls_beyond(sock)
            )
            with self._lock:
                self._strangers.release(sock)
            self._admit(proved)
        except OSError as error:
            with self._lock:
                if sock in self._strangers:
                    self._strangers.refuse(sock, str(error))
                self._report()
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _report(self) -> None:
        """One line about all who were refused, and the next one a minute later."""
        due_s = self._strangers.summary_due_s(time.monotonic())
        if due_s is not None:
            self._loop.call_at(due_s, self._report_due)

    def _report_due(self) -> None:
        with self._lock:
            now_s = time.monotonic()
            due_s = self._strangers.summary_due_s(now_s)
            if due_s is not None and due_s <= now_s:
                _log.warning("%s", self._strangers.summary(now_s))

    def close(self) -> None:
        """Accept nobody any more, and end the threads."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._watch(0)
            threads = list(self._threads)
        for sock in self._sockets:
            sock.close()
        for thread in threads:
            thread.join(PROOF_TIMEOUT_S)


def listen_on_node(purpose: str) -> socket.socket:
    """A Unix socket of this node without a file: its name is random, and goes with the process."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(f"\0torsh-{purpose}-{os.getpid()}-{os.urandom(8).hex()}")
    sock.listen(socket.SOMAXCONN)
    return sock
