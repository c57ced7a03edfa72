"""torch's names for remote calls, over functions that were exposed: `torch.distributed.rpc` with the import changed.

What a script defines itself is exposed by `init_rpc`, so torch's tutorials run; functions of other modules need
`expose`. Functions and objects travel by name and as data, never pickled. Autograd across calls is not offered.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.futures import Future as TorchFuture

from torsh_distributed.comm.store.registry import open_store
from torsh_distributed.comm.trust.job_secret import job_secret
from torsh_distributed.errors import ConfigurationError, FeatureNotAvailable
from torsh_distributed.rpc import current_worker
from torsh_distributed.rpc.calling.remote_future import as_torch_future
from torsh_distributed.rpc.directory import WorkerInfo
from torsh_distributed.rpc.graceful_end import FOREVER_S
from torsh_distributed.rpc.job_store import job_store
from torsh_distributed.rpc.rpc_worker import DEFAULT_TIMEOUT_S, Target, To
from torsh_distributed.rpc.serving.exposed import TABLE

_UNSET = -1.0


@dataclass(kw_only=True)
class TensorPipeRpcBackendOptions:
    """The options of torch's agent that have a meaning here."""

    num_worker_threads: int = 16
    rpc_timeout: float = DEFAULT_TIMEOUT_S
    init_method: str = "env://"
    device_maps: dict[str, Any] = field(default_factory=dict)
    devices: list[Any] = field(default_factory=list)


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """Take calls under `name`; with a world size this returns when all of that many workers do.

    Everything that the script itself defines (`__main__`) can be called from now on by members of the job. `backend` is
    known and has no meaning: there is one. Options may be torch's; maps of devices are refused.
    """
    options = rpc_backend_options or TensorPipeRpcBackendOptions()
    if options.device_maps:
        raise FeatureNotAvailable(
            "maps of devices are not offered",
            hint="tensors of a GPU arrive on the receiver's current GPU by themselves",
        )
    timeout_s = options.rpc_timeout or FOREVER_S
    rank_given = None if rank < 0 else rank
    store = _store_at(options.init_method, rank, timeout_s)
    TABLE.open_module("__main__")
    worker = current_worker.start(
        name, store=store, rank=rank_given, num_threads=options.num_worker_threads, timeout_s=timeout_s
    )
    worker.num_expected = world_size
    if world_size is not None:
        worker.meet("start", world_size)


def _store_at(init_method: str, rank: int, timeout_s: float) -> dist.Store:
    scheme = init_method.partition("://")[0]
    if scheme == "env":
        return job_store(timeout_s, rank=None if rank < 0 else rank)
    if scheme not in ("tcp", "file"):
        raise ConfigurationError("init_method is env://, tcp://host:port or file:///path", init_method=init_method)
    secret = job_secret() if scheme == "tcp" else None
    token = None if secret is None else secret.decode()
    return open_store(
        init_method.partition("?")[0], is_server=scheme == "tcp" and rank == 0, token=token, timeout_s=timeout_s
    )


def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """Leave. Gracefully: once all workers of `init_rpc`'s world size have called this and all calls have ended.

    A `timeout` of 0 is none, as in torch; a worker that is gone and never called this is a CommunicationError at once.
    Without a world size, or with `graceful=False`, at once: calls under way fail. Nothing if not started.
    """
    if not current_worker.is_started():
        return
    worker = current_worker.current_worker()
    limit_s = timeout or FOREVER_S
    try:
        if graceful and worker.num_expected is not None:
            worker.settle_calls()
            worker.leave_together(worker.num_expected, limit_s)
    finally:
        current_worker.stop()


def rpc_sync(
    to: To,
    func: Target,
    args: Iterable[Any] = (),
    kwargs: dict[str, Any] | None = None,
    timeout: float = _UNSET,
) -> Any:
    """Call a function of another worker and wait for its result, as `call` does."""
    return current_worker.call(to, func, args or (), kwargs, timeout_s=_seconds(timeout))


def rpc_async(
    to: To,
    func: Target,
    args: Iterable[Any] = (),
    kwargs: dict[str, Any] | None = None,
    timeout: float = _UNSET,
) -> TorchFuture[Any]:
    """The same without waiting: a `torch.futures.Future`."""
    return as_torch_future(current_worker.call_async(to, func, args or (), kwargs, timeout_s=_seconds(timeout)))


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """Where a worker is, by default this one."""
    return current_worker.worker_info(worker_name)


def _seconds(timeout: float) -> float | None:
    return None if timeout == _UNSET else timeout or FOREVER_S
