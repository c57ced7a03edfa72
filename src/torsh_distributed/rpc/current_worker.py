"""The worker of this process, and the functions that use it: `rpc.start`, `rpc.call` and the others.

They have the parameters of the worker's methods once more: before `start` there is no worker whose methods could be
exported, and editors, the reference and mypy read a function's own signature. A test holds the two equal.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from torsh_distributed.comm.store.registry import open_store
from torsh_distributed.errors import BackendNotInitialized, InvalidArgument
from torsh_distributed.rpc.calling.remote_future import RemoteFuture, RemoteStream
from torsh_distributed.rpc.directory import WorkerInfo
from torsh_distributed.rpc.job_store import job_store
from torsh_distributed.rpc.references.rref import RRef, set_started
from torsh_distributed.rpc.rpc_worker import DEFAULT_TIMEOUT_S, RpcWorker, Target, To

_lock = threading.Lock()
_current: RpcWorker | None = None


def start(
    name: str,
    *,
    store: dist.Store | str | None = None,
    rank: int | None = None,
    host: str | None = None,
    num_threads: int = 16,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    lease_s: float = 30.0,
    most_payload_bytes: int = 1 << 32,
) -> RpcWorker:
    """Take calls in this process from now on, under `name`, and be able to call others.

    `store` is where workers find each other: a store, its URL, or by default the job's own. On one node calls go over
    a Unix socket; `host` is the address for callers on other nodes, by default the one of the job's interface, and no
    port is opened where that is loopback. At most `num_threads` calls run at once, besides inline ones. `timeout_s`
    is for calls that give none. Objects that others refer to live `lease_s` beyond their last sign.
    """
    global _current
    with _lock:
        if _current is not None and not _current.is_closed:
            raise InvalidArgument("this process takes calls already", hint="call rpc.shutdown() first", name=name)
        _current = RpcWorker(
            name,
            open_store(store) if isinstance(store, str) else job_store(timeout_s) if store is None else store,
            rank=rank,
            host=host,
            num_threads=num_threads,
            timeout_s=timeout_s,
            lease_s=lease_s,
            most_payload_bytes=most_payload_bytes,
        )
        set_started(_current)
        return _current


def current_worker() -> RpcWorker:
    """The worker that `start` made."""
    worker = _current
    if worker is None or worker.is_closed:
        raise BackendNotInitialized("this process takes and makes no calls yet", hint="call rpc.start(name) first")
    return worker


def is_started() -> bool:
    """Whether this process takes calls."""
    return _current is not None and not _current.is_closed


def stop() -> None:
    """Leave at once: calls under way fail here and at their callers. Nothing if not started."""
    global _current
    with _lock:
        worker, _current = _current, None
    if worker is not None:
        set_started(None)
        worker.close()


def call(
    to: To,
    function: Target,
    args: Iterable[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    timeout_s: float | None = None,
) -> Any:
    """Call an exposed function of another worker and wait for its result.

    Raises what the function raised, as a RemoteError that is also of the same type if that is a common one;
    OperationTimeout after `timeout_s`, which travels with the call; CommunicationError if the worker is gone.
    """
    return current_worker().call(to, function, args, kwargs, timeout_s=timeout_s)


def call_async(
    to: To,
    function: Target,
    args: Iterable[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    timeout_s: float | None = None,
) -> RemoteFuture:
    """The same without waiting for the result: a future that can also be awaited or cancelled.

    Returns when the kernel has all of the arguments, so tensors may be written to afterwards.
    """
    return current_worker().call_async(to, function, args, kwargs, timeout_s=timeout_s)


def call_all(
    names: Iterable[To],
    function: Target,
    args: Iterable[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    timeout_s: float | None = None,
) -> dict[str, Any]:
    """Call a function of several workers at once: for each name its result, or the error as a value."""
    return current_worker().call_all(names, function, args, kwargs, timeout_s=timeout_s)


def stream(
    to: To,
    function: Target,
    args: Iterable[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    timeout_s: float | None = None,
) -> RemoteStream:
    """Call an exposed generator function: an iterator over what it yields, as it comes.

    The callee's function waits while a few items are unread. `close` ends it at its next `yield`.
    """
    return current_worker().stream(to, function, args, kwargs, timeout_s=timeout_s)


def remote(
    to: To, func: Target, args: Iterable[Any] = (), kwargs: dict[str, Any] | None = None, timeout: float = -1.0
) -> RRef:
    """Call a function or make an object at another worker, and keep the result there: returns a reference at once.

    `timeout` in seconds, as torch has it: -1 is the worker's own.
    """
    return current_worker().remote(to, func, args or (), kwargs, timeout_s=None if timeout < 0 else timeout)


def ping(to: To, *, timeout_s: float | None = None) -> float:
    """Seconds that an empty call takes there and back."""
    return current_worker().ping(to, timeout_s=timeout_s)


def worker_info(name: To | None = None) -> WorkerInfo:
    """Where a worker is, by default this one."""
    worker = current_worker()
    return worker.info if name is None else worker.find(name)


def workers() -> list[WorkerInfo]:
    """All workers that take calls now."""
    return current_worker().workers()


def wait_for_workers(names: Iterable[str], *, timeout_s: float | None = None) -> None:
    """Until workers with all these names take calls; OperationTimeout, naming the missing ones."""
    current_worker().wait_for(names, timeout_s=timeout_s)
