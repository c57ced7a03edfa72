"""Thousands of ranks without a process each: tasks that join a real store, over real sockets, as `init()` does.

Each makes the one connection of a real client, proves the job's secret, announces itself, waits for rank 0's verdict
and reads it. Rank 0 is real: it runs `comm.meeting.rendezvous.join`. The store is in the process that `torsh run`
starts for its workers.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import resource
import socket
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch.distributed as dist

from benchmarks.machine import ROOT
from benchmarks.process_usage import cpu_s, peak_bytes
from torsh_distributed.comm.meeting.rendezvous import join
from torsh_distributed.comm.meeting.software_versions import own_software
from torsh_distributed.comm.store.registry import open_store
from torsh_distributed.comm.store.tcp import tcp_protocol
from torsh_distributed.comm.trust.handshake import Handshake
from torsh_distributed.launch.nodes.store_process import StoreProcess

_SECRET = "the secret of a benchmark"
_PREFIX = "torsh/0/"
_RANKS_PER_NODE = 8
_GREETINGS_AT_ONCE = 128
_TIMEOUT_S = 240.0
_WANTED_FILES = 10_000 + 1_000
_PAUSES_S = (0.02, 0.5)
"""The real client's first and longest pause between attempts to connect."""


@dataclass(frozen=True)
class JoinCost:
    """What it took for all ranks to join."""

    num_ranks: int
    wall_s: float
    store_cpu_s: float
    store_peak_bytes: int
    messages_per_join: float
    """Frames sent and received by a rank, proofs included, and those of attempts that were turned away."""
    verdict_bytes: int


class _Gate:
    """Lets so many in at once. asyncio's semaphore looks through all who wait, which thousands notice."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        if self._places:
            self._places -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    async def __aexit__(self, *_: object) -> None:
        if self._waiting:
            self._waiting.popleft().set_result(None)
        else:
            self._places += 1


class _LightConnection:
    """A greeted connection that asks one thing at a time."""

    def __init__(self, counts: list[int], gate: _Gate) -> None:
        self._counts = counts
        self._gate = gate
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def open(self, port: int) -> None:
        """Connect and prove the secret; one that is turned away tries again, as the real client does."""
        pause_s = _PAUSES_S[0]
        while True:
            try:
                async with self._gate:
                    self._reader, self._writer = await asyncio.open_connection("127.0.0.1", port)
                    await self._greet()
                    await self.ask(tcp_protocol.FIELDS + tcp_protocol.encode([b"flush"]))
                return
            except (ConnectionError, asyncio.IncompleteReadError):
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
                pause_s = min(_PAUSES_S[1], pause_s * 1.5)

    async def _greet(self) -> None:
        handshake = Handshake(_SECRET.encode(), tcp_protocol.MAGIC, is_server=False, wants_signing=False)
        reply = handshake.opening
        while True:
            self._counts[0] += bool(reply)
            self._writer.write(reply)
            if handshake.is_done:
                return
            data = await self._reader.read(4096)
            if not data:
                raise ConnectionResetError("turned away")
            self._counts[0] += 1
            reply = handshake.feed(data)

    def tell(self, body: bytes) -> None:
        self._counts[0] += 1
        self._writer.write(tcp_protocol.frame(body))

    async def ask(self, body: bytes) -> bytes:
        self.tell(body)
        (length,) = tcp_protocol.FRAME_HEADER.unpack(await self._reader.readexactly(tcp_protocol.FRAME_HEADER.size))
        self._counts[0] += 1
        return await self._reader.readexactly(length)

    def close(self) -> None:
        self._writer.close()


async def _join_lightly(
    rank: int, world_size: int, port: int, gate: _Gate, counts: list[int], sizes: list[int]
) -> None:
    """One rank's part: what `join` does, without a process."""
    store = _LightConnection(counts, gate)
    await store.open(port)
    number = await store.ask(tcp_protocol.ADD_HEADER.pack(tcp_protocol.ADD, 1) + f"{_PREFIX}arrivals".encode())
    arrival = {
        "rank": rank,
        "world_size": world_size,
        "host": f"host{rank // _RANKS_PER_NODE}",
        "pid": rank,
        "node": f"{uuid.UUID(int=rank // _RANKS_PER_NODE)}:4026531836:4026531840:1000",
        "network": f"{uuid.UUID(int=rank // _RANKS_PER_NODE)}:4026531840",
        "software": asdict(own_software()),
    }
    key = f"{_PREFIX}arrival/{int(number[1:])}".encode()
    store.tell(tcp_protocol.KEY_HEADER.pack(tcp_protocol.SET, len(key)) + key + json.dumps(arrival).encode())
    await store.ask(tcp_protocol.FIELDS + tcp_protocol.encode([b"flush"]))
    verdict = f"{_PREFIX}verdict/0".encode()
    request = tcp_protocol.encode([b"wait", tcp_protocol.number(_TIMEOUT_S), verdict])
    await store.ask(tcp_protocol.FIELDS + request)
    said = await store.ask(tcp_protocol.GET + verdict)
    assert "error" not in json.loads(said[1:]), said[:500]
    sizes[0] = len(said)
    store.close()


async def _join_all(world_size: int, port: int, counts: list[int], sizes: list[int]) -> None:
    # A real rank answers the store at once; one process that plays thousands answers so many at once, no more.
    gate = _Gate(_GREETINGS_AT_ONCE)
    async with asyncio.TaskGroup() as tasks:
        for rank in range(1, world_size):
            tasks.create_task(_join_lightly(rank, world_size, port, gate, counts, sizes))


def join_ranks(num_ranks: int) -> JoinCost:
    """Have that many ranks join one store, and say what it took."""
    with _many_files(), socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:
        store = StoreProcess(_SECRET)
        try:
            store.serve([listener])
            port = listener.getsockname()[1]
            with open_store(f"tcp://127.0.0.1:{port}", timeout_s=_TIMEOUT_S, token=_SECRET) as own:
                return _measure(num_ranks, port, store.pid, own)
        finally:
            store.close()


def _measure(num_ranks: int, port: int, pid: int, own: dist.Store) -> JoinCost:
    """Rank 0 here, the others in a process of their own: in one, they would wait for each other's Python lock."""
    command = [sys.executable, "-m", __spec__.name, str(num_ranks), str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as others:
        assert others.stdin is not None
        assert others.stdout is not None
        assert others.stdout.readline() == "ready\n"
        before_s, start_s = cpu_s(pid), time.perf_counter()
        others.stdin.write("go\n")
        others.stdin.close()
        prefixed = dist.PrefixStore("torsh/0", own)
        join(prefixed, rank=0, world_size=num_ranks, timeout_s=_TIMEOUT_S, node="node-0")
        num_messages, verdict_bytes = map(int, others.stdout.readline().split())
        wall_s = time.perf_counter() - start_s
        return JoinCost(
            num_ranks=num_ranks,
            wall_s=wall_s,
            store_cpu_s=cpu_s(pid) - before_s,
            store_peak_bytes=peak_bytes(pid),
            messages_per_join=num_messages / max(1, num_ranks - 1),
            verdict_bytes=verdict_bytes,
        )


def _play(num_ranks: int, port: int) -> None:
    """In the process of the others: be them all, and say how many messages that took."""
    counts, sizes = [0], [0]
    gc.disable()  # it would look through the tasks of all ranks again and again, which real ranks do not share
    print("ready", flush=True)
    sys.stdin.readline()
    asyncio.run(_join_all(num_ranks, port, counts, sizes))
    print(counts[0], sizes[0], flush=True)


def most_ranks() -> int:
    """As many ranks as the store and the process that plays them may have connections for."""
    return _most_files() - 500


def _most_files() -> int:
    """As many open files as this user can get: root may raise the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < _WANTED_FILES:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, _WANTED_FILES))
        except (ValueError, OSError):
            return hard
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


@contextmanager
def _many_files() -> Iterator[None]:
    """Allow this process and its children as many open files as the system lets this user have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)[0], _most_files()
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


if __name__ == "__main__":
    _play(int(sys.argv[1]), int(sys.argv[2]))
