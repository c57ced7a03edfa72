"""A PMI-1 server for `torsh run --mpi`, through which the processes of an MPICH job find each other.

The protocol is lines of `key=value` words. A process asks for its world, puts its address into a table, waits for the
others at a barrier, and reads their addresses from the table. Each attempt of a job has its own table.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import threading
from typing import Self

from torsh_distributed.comm.trust.job_secret import peer_uid

_READ_BYTES = 65536
_CLOSE_TIMEOUT_S = 5.0


class PmiWorld:
    """The processes of one attempt: pure, lines in, lines out."""

    def __init__(self, size: int) -> None:
        self._size = size
        # Unique on this node: MPICH names its shared memory after it.
        self._name = f"torsh_{secrets.token_hex(8)}"
        # One node: ranks 0 to size - 1 share memory.
        self._table = {"PMI_process_mapping": f"(vector,(0,1,{size}))"}
        self._at_barrier: list[int] = []

    def answer(self, rank: int, line: str) -> list[tuple[int, str]]:
        """The replies (rank, line) to a line of `rank`."""
        words = dict(word.split("=", 1) for word in line.split() if "=" in word)
        command = words.get("cmd", "")
        match command:
            case "init":
                reply = "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"
            case "get_maxes":
                reply = "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024 rc=0"
            case "get_appnum":
                reply = "cmd=appnum appnum=0 rc=0"
            case "get_my_kvsname":
                reply = f"cmd=my_kvsname kvsname={self._name} rc=0"
            case "get_universe_size":
                reply = f"cmd=universe_size size={self._size} rc=0"
            case "put":
                self._table[words["key"]] = words["value"]
                reply = "cmd=put_result rc=0"
            case "get":
                value = self._table.get(words["key"])
                reply = (
                    f"cmd=get_result rc=0 value={value}"
                    if value is not None
                    else "cmd=get_result rc=-1 msg=key_not_found"
                )
            case "barrier_in":
                return self._meet(rank)
            case "finalize":
                reply = "cmd=finalize_ack rc=0"
            case "abort":
                return []  # the process ends itself next, and the launcher reports it
            case _ if line.strip() == "endcmd":
                reply = "cmd=spawn_result rc=-1 msg=not_supported"  # the only command of several lines
            case "":
                return []
            case _:
                reply = f"cmd={command}_result rc=-1 msg=not_supported"
        return [(rank, reply)]

    def _meet(self, rank: int) -> list[tuple[int, str]]:
        self._at_barrier.append(rank)
        if len(self._at_barrier) < self._size:
            return []
        released, self._at_barrier = self._at_barrier, []
        return [(other, "cmd=barrier_out rc=0") for other in released]


class _Client:
    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self.attempt: int | None = None
        self.rank = -1
        self._rest = b""

    def read_lines(self) -> list[str] | None:
        """The whole lines received, or None at the end of the connection."""
        try:
            data = self.link.recv(_READ_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode(errors="replace") for line in lines]


class PmiServer:
    """Serves the workers of a job on one node, in a thread, on a socket that only this user's processes may use.

    The socket has a name but no file, so a killed launcher leaves nothing behind.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.address = f"torsh-pmi-{secrets.token_hex(8)}"
        self._worlds: dict[int, PmiWorld] = {}
        self._clients: dict[tuple[int, int], _Client] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{self.address}")
        self._listener.listen(size)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._stop = os.eventfd(0)
        self._selector.register(self._stop, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="torsh-pmi", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.eventfd_write(self._stop, 1)
        self._thread.join(_CLOSE_TIMEOUT_S)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Client):
                key.data.link.close()
        self._selector.close()
        self._listener.close()
        os.close(self._stop)

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data is None:
                    return
                else:
                    self._hear(key.data)

    def _accept(self) -> None:
        link, _ = self._listener.accept()
        if peer_uid(link) != os.getuid():
            link.close()
            return
        self._selector.register(link, selectors.EVENT_READ, _Client(link))

    def _hear(self, client: _Client) -> None:
        lines = client.read_lines()
        if lines is None:
            self._forget(client)
            return
        try:
            for line in lines:
                self._take(client, line)
        except (KeyError, ValueError):
            self._forget(client)  # not one of our workers: it does not speak PMI

    def _take(self, client: _Client, line: str) -> None:
        if client.attempt is None:
            self._welcome(client, line)
            return
        for rank, reply in self._worlds[client.attempt].answer(client.rank, line):
            self._say(self._clients.get((client.attempt, rank)), reply)

    def _welcome(self, client: _Client, line: str) -> None:
        """The first line of a worker: `attempt rank`."""
        client.attempt, client.rank = map(int, line.split())
        self._worlds.setdefault(client.attempt, PmiWorld(self._size))
        self._clients[client.attempt, client.rank] = client

    def _say(self, client: _Client | None, line: str) -> None:
        if client is None:
            return  # it ended in the meantime
        try:
            client.link.sendall(line.encode() + b"\n")
        except ConnectionError:
            self._forget(client)

    def _forget(self, client: _Client) -> None:
        if client.attempt is not None:
            self._clients.pop((client.attempt, client.rank), None)
        self._selector.unregister(client.link)
        client.link.close()
