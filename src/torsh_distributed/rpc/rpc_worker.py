"""`RpcWorker`: one process that takes calls under a name, and calls others by theirs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from torsh_distributed.comm.transport.connection_pool import ConnectionPoolStats
from torsh_distributed.comm.transport.event_loop import EventLoop
from torsh_distributed.comm.transport.listener import listen_on_node
from torsh_distributed.errors import InvalidArgument, TorshError, translate_errors
from torsh_distributed.rpc.call_targets import WorkerTargets
from torsh_distributed.rpc.calling.connecting import listen_on_network
from torsh_distributed.rpc.calling.link import Link, PendingCall
from torsh_distributed.rpc.calling.remote_future import RemoteFuture, RemoteStream
from torsh_distributed.rpc.calling.worker_links import WorkerLinks
from torsh_distributed.rpc.directory import WorkerDirectory, WorkerInfo
from torsh_distributed.rpc.graceful_end import GracefulEnd
from torsh_distributed.rpc.messages.lane_pair import CALL, REMOTE, STREAM
from torsh_distributed.rpc.references.held_references import HeldReferences
from torsh_distributed.rpc.references.object_table import ObjectTable
from torsh_distributed.rpc.references.rref import RRef
from torsh_distributed.rpc.serving.call_server import CallServer
from torsh_distributed.rpc.serving.exposed import TABLE
from torsh_distributed.rpc.serving.served_call import current_call
from torsh_distributed.rpc.travelling_values import TravellingValues

Target = str | tuple[str, str] | Callable[..., Any]
"""An exposed function, its name, or the key of an object and a method."""
To = str | int | WorkerInfo
"""A worker: its name, its number, or what `worker_info` returns."""
DEFAULT_TIMEOUT_S = 60.0
_CLOSE_S = 2.0


class RpcWorker:
    """Takes calls until it is closed. Any thread."""

    def __init__(
        self,
        name: str,
        store: dist.Store,
        *,
        rank: int | None = None,
        host: str | None = None,
        num_threads: int = 16,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        lease_s: float = 30.0,
        most_payload_bytes: int = 1 << 32,
        objects: Mapping[str, Any] | None = None,
    ) -> None:
        """See `rpc.start`. `objects` are offered by their keys, to `call(name, (key, method))`, while it lives."""
        if not name or name.startswith("@"):
            raise InvalidArgument("a worker's name is a text that does not begin with @", name=name)
        self.name = name
        self.timeout_s = timeout_s
        self.objects = ObjectTable(name, lease_s, offered=objects or {})
        self.is_closed = False
        self.num_expected: int | None = None
        """How many workers the job was started with, if that is known."""
        self._lease_s = lease_s
        self.directory = WorkerDirectory(store)
        """Who is there, and what workers write down for each other."""
        secret = self.directory.secret()
        self._lock = threading.Lock()
        self._names_by_id: dict[int, str] = {}
        self._num_remote = 0
        self._end = GracefulEnd()
        self._loop = EventLoop("rpc-replies")
        self.references = HeldReferences(self, lease_s, self._run_later)
        """What this process holds of others' objects."""
        registry = TravellingValues(self, self.references)
        unix, tcp = listen_on_node("rpc"), listen_on_network(host)
        self._server = CallServer(
            [unix, *([] if tcp is None else [tcp])],
            secret,
            targets=WorkerTargets(self.objects, self._end.functions()),
            registry=registry,
            num_threads=num_threads,
            most_payload_bytes=most_payload_bytes,
        )
        self._links = WorkerLinks(
            name,
            self.directory,
            secret,
            loop=self._loop,
            registry=registry,
            most_payload_bytes=most_payload_bytes,
        )
        try:
            tcp_address = None if tcp is None else tcp.getsockname()[:2]
            self.info = self.directory.add(name, unix.getsockname().decode(), tcp_address, rank)
        except BaseException:
            self._stop()
            raise
        self._is_listed = True
        self._keep_house_later()

    # Calling

    def call(
        self,
        to: To,
        function: Target,
        args: Iterable[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Any:
        """See `rpc.call`."""
        link, pending = self._begin(CALL, to, function, args, kwargs, timeout_s)
        return link.wait(pending)

    def call_async(
        self,
        to: To,
        function: Target,
        args: Iterable[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> RemoteFuture:
        """See `rpc.call_async`."""
        link, pending = self._begin(CALL, to, function, args, kwargs, timeout_s)
        return RemoteFuture(link, pending, self._loop)

    def call_all(
        self,
        names: Iterable[To],
        function: Target,
        args: Iterable[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """See `rpc.call_all`."""
        args = tuple(args)
        results: dict[str, Any] = {}
        for name in map(self._name_of, names):
            try:
                results[name] = self.call_async(name, function, args, kwargs, timeout_s=timeout_s)
            except TorshError as error:
                results[name] = error
        for name, future in results.items():
            if isinstance(future, RemoteFuture):
                problem = future.exception()
                results[name] = future.result() if problem is None else problem
        return results

    def stream(
        self,
        to: To,
        function: Target,
        args: Iterable[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> RemoteStream:
        """See `rpc.stream`."""
        link, pending = self._begin(STREAM, to, function, args, kwargs, timeout_s)
        return RemoteStream(link, pending)

    def remote(
        self,
        to: To,
        function: Target,
        args: Iterable[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> RRef:
        """See `rpc.remote`."""
        owner = self._name_of(to)
        with self._lock:
            self._num_remote += 1
            key = f"{self.name}/{self.info.pid}/{self._num_remote}@{owner}"
        link, pending = self._begin(REMOTE, owner, function, args, kwargs, timeout_s, key)
        return RRef.to(self, owner, key, RemoteFuture(link, pending, self._loop))

    def ping(self, to: To, *, timeout_s: float | None = None) -> float:
        """See `rpc.ping`."""
        start_s = time.perf_counter()
        self.call(to, "@echo", (0,), timeout_s=timeout_s)
        return time.perf_counter() - start_s

    def _begin(
        self,
        kind: int,
        to: To,
        function: Target,
        args: Iterable[Any],
        kwargs: dict[str, Any] | None,
        timeout_s: float | None,
        *rest: Any,
    ) -> tuple[Link, PendingCall]:
        if callable(function):
            function = TABLE.name_of(function)
        serving = current_call()
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        if serving is not None and timeout_s is None:
            limit_s = min(limit_s, serving.remaining_s)
        pending = PendingCall(function if isinstance(function, str) else function[1], time.monotonic() + limit_s)
        if kind == STREAM:
            pending.expect_items()
        link = self._links.to(to if isinstance(to, str) else self._name_of(to))
        link.begin(kind, function, list(args), kwargs or {}, pending, *rest)
        return link, pending

    # Who is there

    def _name_of(self, to: To) -> str:
        if isinstance(to, WorkerInfo):
            return to.name
        if isinstance(to, str):
            return to
        if to not in self._names_by_id:
            self._names_by_id = {info.id: info.name for info in self.workers()}
        if to not in self._names_by_id:
            raise InvalidArgument("there is no worker with this number", id=to, workers=str(self._names_by_id))
        return self._names_by_id[to]

    def find(self, to: To) -> WorkerInfo:
        """Where a worker is."""
        return self.directory.find(self._name_of(to))

    def workers(self) -> list[WorkerInfo]:
        """All that are there now."""
        return self.directory.workers()

    def wait_for(self, names: Iterable[str], *, timeout_s: float | None = None) -> None:
        """See `rpc.wait_for_workers`."""
        wanted = list(names)
        with translate_errors("wait_for_workers", workers=", ".join(wanted)):
            self.directory.wait(wanted, self.timeout_s if timeout_s is None else timeout_s)

    def meet(self, what: str, num_workers: int, *, timeout_s: float | None = None) -> None:
        """Until as many workers have come to the same point."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        with translate_errors(f"rpc {what}", num_workers=num_workers):
            self.directory.meet(what, num_workers, limit_s)

    def leave_together(self, num_workers: int, timeout_s: float) -> None:
        """Until as many workers have come to their end, and none needs the store any more that worker 0 may host."""
        self._end.wait(self, num_workers, timeout_s)
        self._unlist()
        with translate_errors("rpc end", num_workers=num_workers):
            # All have agreed to leave, so this takes no time of its own.
            self.directory.meet("left", num_workers, min(timeout_s, DEFAULT_TIMEOUT_S), waits=self.info.id == 0)

    def settle_calls(self) -> None:
        """Until all calls of this worker have ended, in whatever way."""
        self._links.settle_all()

    def connections(self) -> ConnectionPoolStats:
        """The links to other workers."""
        return self._links.stats()

    # Housekeeping

    def _run_later(self, function: Callable[[], None]) -> None:
        self._server.threads.submit(function)

    def _keep_house_later(self) -> None:
        self._loop.call_at(time.monotonic() + self._lease_s / 3, self._keep_house_soon)

    def _keep_house_soon(self) -> None:
        """On the loop, which must not wait for owners."""
        self._run_later(self._keep_house)
        self._keep_house_later()

    def _keep_house(self) -> None:
        """Renew what this process holds; forget what nobody holds, and connections that nobody uses."""
        self.references.forget_given(time.monotonic())
        self.references.renew()
        self.objects.drop_expired()
        self._links.drop_idle()
        self._server.drop_idle()

    # The end

    def close(self) -> None:
        """Leave: calls under way fail here and at their callers."""
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
        try:
            self._unlist()
        finally:
            self._stop()

    def _unlist(self) -> None:
        if self._is_listed:
            self._is_listed = False
            self.directory.remove(self.info)

    def _stop(self) -> None:
        self.is_closed = True
        self._links.close()
        self._server.close(_CLOSE_S)
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
