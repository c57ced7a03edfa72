"""The server of TCP stores: a table in an event loop, on a thread of its own.

torch's TCPStore cannot keep the contract (no expiry, no conditional delete, a compare-and-set that does not say
which client won; see docs/decisions/0003-stores.md), so our clients are served from the table. Plain torch clients that
connect to the same port are forwarded to a TCPStore inside: a script that knows only torch meets its peers there.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Self
from weakref import WeakValueDictionary

import torch.distributed as dist

from torsh_distributed.comm.store import tcp_protocol
from torsh_distributed.comm.store.table import Table
from torsh_distributed.errors import InvalidArgument, IoError

_log = logging.getLogger(__name__)

_GREETING_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 10.0
_BUFFER_BYTES = 2**20
# torch's server closes the connection if a client's first message arrives in pieces, so it is forwarded whole.
_TORCH_GREETING_BYTES = 5
_BACKLOG = 2048


class TcpStoreServer:
    """Listens on construction and serves until closed.

    `host` is loopback unless the caller says otherwise; port 0 takes a free one, see `.port`. With a token, only
    clients that have it are served; plain torch clients, which cannot prove one, are refused.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, *, token: str | None = None) -> None:
        listener = _listen(host, port)
        self.host = host
        self.port: int = listener.getsockname()[1]
        self._listener = listener
        self._token = token
        if token is None and not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
            _log.warning("the store at %s can be reached from other nodes and requires no token", self.url)
        self._table = Table()
        # An event lives as long as a client waits for its key.
        self._arrivals: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()
        self._torch_store: dist.TCPStore | None = None
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=f"torsh-store-{self.port}", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The address for clients; a wildcard address is shown as it is."""
        return tcp_url(self.host, self.port)

    def close(self) -> None:
        """Stop serving: waiting clients see the connection close. The keys are gone."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(_CLOSE_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()
            self._torch_store = None

    async def _serve(self) -> None:
        clients: set[asyncio.Task[None]] = set()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(self._welcome(reader, writer))
            clients.add(task)
            task.add_done_callback(clients.discard)

        server = await asyncio.start_server(accept, sock=self._listener, limit=_BUFFER_BYTES)
        await self._stop.wait()
        server.close()
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection from its first byte to its end."""
        sock: socket.socket = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        try:
            async with asyncio.timeout(_GREETING_TIMEOUT_S):
                opening = await reader.readexactly(_TORCH_GREETING_BYTES)
                is_ours = tcp_protocol.MAGIC.startswith(opening)
                if is_ours:
                    await self._greet(opening, reader, writer)
            if is_ours:
                await self._answer(reader, writer)
            else:
                await self._pass_on(opening, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError) as error:
            _log.debug("a client of %s left: %r", self.url, error)
        except ValueError as error:
            _log.warning("a client of %s was refused: %s", self.url, error)
        except Exception:
            _log.exception("serving a client of %s failed", self.url)
        finally:
            writer.close()

    async def _greet(self, opening: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        greeting = opening + await reader.readexactly(len(tcp_protocol.MAGIC) + tcp_protocol.NONCE_BYTES - len(opening))
        if not greeting.startswith(tcp_protocol.MAGIC):
            raise ValueError("it speaks a different version of the protocol")
        ours = secrets.token_bytes(tcp_protocol.NONCE_BYTES)
        nonces = greeting[len(tcp_protocol.MAGIC) :] + ours
        writer.write(tcp_protocol.MAGIC + ours + tcp_protocol.proof(self._token, "server", nonces))
        answer = await reader.readexactly(tcp_protocol.PROOF_BYTES)
        if not hmac.compare_digest(answer, tcp_protocol.proof(self._token, "client", nonces)):
            raise ValueError("it does not have the token")

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            (num_bytes,) = tcp_protocol.FRAME_HEADER.unpack(await reader.readexactly(tcp_protocol.FRAME_HEADER.size))
            if num_bytes > tcp_protocol.MAX_FRAME_BYTES:
                raise ValueError(f"it announced a frame of {num_bytes} bytes")
            op, *args = tcp_protocol.decode(await reader.readexactly(num_bytes))
            try:
                if op == b"wait":
                    reply = await self._wait(args)
                else:
                    reply = self._apply(op, args)
                writer.write(tcp_protocol.encode([b"ok", *reply]))
            except InvalidArgument as error:
                writer.write(tcp_protocol.encode([b"invalid", json.dumps(error.to_dict()).encode()]))
            await writer.drain()

    def _apply(self, op: tcp_protocol.TcpField, args: list[tcp_protocol.TcpField]) -> list[tcp_protocol.TcpField]:
        """Do one operation on the table, at once."""
        table = self._table
        match op, args:
            case b"get", names:
                return [table.get(key) for key in _keys(names)]
            case b"set", [bytes(key), bytes(value), ttl_s]:
                return self._write(key, lambda name: table.set(name, value, _seconds(ttl_s)))
            case b"delete", [bytes(key)]:
                return [tcp_protocol.number(int(table.delete(key.decode())))]
            case b"cas", [bytes(key), expected, bytes(desired), ttl_s]:
                swap = table.compare_and_swap(key.decode(), expected, desired, _seconds(ttl_s))
                if swap:
                    self._wake(key.decode())
                return [tcp_protocol.number(int(swap.swapped)), swap.value]
            case b"add", [bytes(key), bytes(delta)]:
                return self._write(key, lambda name: table.add(name, int(delta)))
            case b"append", [bytes(key), bytes(suffix)]:
                return self._write(key, lambda name: table.append(name, suffix))
            case b"count", [bytes(prefix)]:
                return [tcp_protocol.number(table.count(prefix.decode()))]
        raise ValueError(f"it asked for {op!r} with {len(args)} arguments")

    def _write(self, key: bytes, action: Callable[[str], int | None]) -> list[tcp_protocol.TcpField]:
        name = key.decode()
        result = action(name)
        self._wake(name)
        return [tcp_protocol.number(result)]

    def _wake(self, key: str) -> None:
        arrival = self._arrivals.pop(key, None)
        if arrival is not None:
            arrival.set()

    async def _wait(self, args: list[tcp_protocol.TcpField]) -> list[tcp_protocol.TcpField]:
        """Wait until all keys exist or the time is up; the keys still missing."""
        timeout_s, *names = args
        keys = _keys(names)
        deadline = time.monotonic() + (_seconds(timeout_s) or 0.0)
        while missing := self._table.missing(keys):
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                break
            arrival = self._arrivals.setdefault(missing[0], asyncio.Event())
            try:
                async with asyncio.timeout(remaining_s):
                    await arrival.wait()
            except TimeoutError:
                continue  # the loop checks once more and then gives up
        return [key.encode() for key in missing]

    async def _pass_on(self, opening: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward between a plain torch client and the TCPStore inside, until either side ends."""
        if self._token is not None:
            raise ValueError("it is a plain torch client, which cannot prove the token that this store requires")
        if self._torch_store is None:
            self._torch_store = _start_torch_store()
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._torch_store.port)
        try:
            inner_writer.write(opening)
            ways = [asyncio.create_task(_pump(reader, inner_writer)), asyncio.create_task(_pump(inner_reader, writer))]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        finally:
            inner_writer.close()


def tcp_url(host: str, port: int) -> str:
    """The address as `open_store` takes it."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _keys(names: list[tcp_protocol.TcpField]) -> list[str]:
    return [name.decode() for name in names if name is not None]


def _seconds(field: tcp_protocol.TcpField) -> float | None:
    return None if field is None else float(field)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_BUFFER_BYTES):
        writer.write(data)
        await writer.drain()


def _start_torch_store() -> dist.TCPStore:
    # torch's own listener would listen on every interface; only this server needs to reach it.
    listener = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=_GREETING_TIMEOUT_S),
        master_listen_fd=listener.detach(),
    )


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server((address[0], port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise IoError(
            f"the store cannot listen on {host}:{port}: {error.strerror or error}",
            hint="choose another port (0 takes a free one) and an address of this node",
            host=host,
            port=port,
            errno=error.errno,
        ) from error
