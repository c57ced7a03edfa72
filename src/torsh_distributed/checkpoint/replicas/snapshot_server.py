"""Takes other ranks' snapshots into memory and gives parts of them back, on a thread per connection."""

from __future__ import annotations

import logging
import os
import socket
import threading
from contextlib import suppress
from typing import Any

from torsh_distributed.checkpoint.replicas.snapshot_memory import Snapshot, SnapshotShelf
from torsh_distributed.comm.transport.connection import Connection
from torsh_distributed.comm.transport.frames import FrameLimits

_log = logging.getLogger(__name__)

_NICENESS = 10
"""Threads that move snapshots give way to training."""
_CLOSE_S = 10.0
_PROTOCOL = b"TORSHRP2"
_LIMITS = FrameLimits(head_bytes=1 << 20, payload_bytes=1 << 34)
_MESSAGE_TIMEOUT_S = 60.0
CHUNK_BYTES = 8 << 20
"""Snapshots travel in pieces of this size."""


def connect_to_server(address: tuple[str, int], secret: bytes) -> Connection:
    """Connect to another rank's server."""
    return Connection.connect(address, secret, _PROTOCOL, limits=_LIMITS, timeout_s=_MESSAGE_TIMEOUT_S)


def give_way() -> None:
    """Lower the priority of the calling thread alone: Linux keeps one for each thread."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


class SnapshotServer:
    """Serves a shelf on a port of this rank until it is closed."""

    def __init__(self, host: str, secret: bytes, shelf: SnapshotShelf) -> None:
        self._secret = secret
        self._shelf = shelf
        self._listener = socket.create_server((host, 0), family=_family(host), backlog=64)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._lock = threading.Lock()
        self._is_closed = False
        self._connections: set[Connection] = set()
        self._threads = [threading.Thread(target=self._accept, name="snapshot-server", daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        """End all connections and threads."""
        with self._lock:
            self._is_closed = True
            connections = list(self._connections)
        with suppress(OSError):  # it wakes the thread up; some systems refuse it for a listener
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in connections:
            connection.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_CLOSE_S)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # closed
            with self._lock:
                if self._is_closed:
                    sock.close()
                    return
                self._threads = [one for one in self._threads if one.is_alive()]
                thread = threading.Thread(target=self._serve, args=(sock,), name="snapshot-connection", daemon=True)
                self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        give_way()
        try:
            connection = Connection.accept(sock, self._secret, _PROTOCOL, limits=_LIMITS, timeout_s=_MESSAGE_TIMEOUT_S)
        except OSError as error:
            _log.warning("a connection to the snapshots of this rank was refused: %s", error)
            return
        with self._lock:
            is_closed = self._is_closed
            self._connections.add(connection)
        try:
            while not is_closed:
                header, payload = connection.receive(waits=True)
                self._answer(connection, header, payload)
        except OSError:
            return  # the other rank has left; what it had not completed is dropped
        finally:
            connection.close()
            with self._lock:
                self._connections.discard(connection)

    def _answer(self, connection: Connection, header: dict[str, Any], payload: memoryview) -> None:
        if header["kind"] == "put":
            self._take(connection, header, bytes(payload))
            return
        found = self._shelf.get(header["rank"], header["step"])
        if found is None:
            connection.send({"error": f"step {header['step']} of rank {header['rank']} is not here"})
            return
        connection.send({}, found.view()[header["start"] : header["start"] + header["length"]])

    def _take(self, connection: Connection, header: dict[str, Any], facts: bytes) -> None:
        """Receive a snapshot in pieces; it counts once its last piece is here."""
        rank, step, num_bytes = header["rank"], header["step"], header["num_bytes"]
        spare = self._shelf.keep_only(rank, header["keep"])
        fitting = next((one for one in spare if one.numel() == num_bytes), None)
        for one in spare:
            if one is not fitting:
                self._shelf.release(one)
        memory = self._shelf.allocate(num_bytes, is_pinned=False) if fitting is None else fitting
        view, done = memory.numpy().data, 0
        while done < num_bytes:
            start = done
            _, part = connection.receive(lambda _, length: view[start : start + length])  # noqa: B023 (called at once)
            done += len(part)
        self._shelf.put(Snapshot(rank, step, memory, facts))
        connection.send({"stored": step})


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
