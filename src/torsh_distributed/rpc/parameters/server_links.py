"""Calls of a client to all of its servers, repeated while one of them is being started again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torsh_distributed.errors import CommunicationError, InvalidArgument
from torsh_distributed.plan.sections.recovery import RetryConfig
from torsh_distributed.retry import retry
from torsh_distributed.rpc.calling.remote_future import RemoteFuture
from torsh_distributed.rpc.current_worker import current_worker
from torsh_distributed.rpc.parameters.parameter_server import SERVICE
from torsh_distributed.rpc.rpc_worker import RpcWorker

FIRST_WAIT_S, LONGEST_WAIT_S = 0.02, 0.2
_CALL_S = 30.0
"""One attempt; longer waits, for other workers, are several."""


class ServerLinks:
    """Calls to all servers at once, repeated while one of them is not there. What is called may arrive twice."""

    def __init__(self, servers: Sequence[str], worker: RpcWorker | None, timeout_s: float) -> None:
        if not servers or len(set(servers)) != len(servers):
            raise InvalidArgument("the servers are one or more different names", servers=", ".join(servers))
        self.worker = current_worker() if worker is None else worker
        self.names = list(servers)
        self._timeout_s = timeout_s
        policy = RetryConfig(
            max_retries=10**6,
            initial_delay_s=FIRST_WAIT_S,
            max_delay_s=LONGEST_WAIT_S,
            total_timeout_s=timeout_s,
        )
        self._finish = retry(policy)(self._finish_once)
        self.worker.wait_for(self.names, timeout_s=timeout_s)

    def call(self, method: str, args: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        """Call a method of these servers; all are under way before the first is waited for."""
        futures: dict[str, RemoteFuture | None] = {name: self._begin(name, method, args[name]) for name in args}
        return {name: self._finish(futures, name, method, args[name]) for name in futures}

    def call_all(self, method: str, *args: Any) -> dict[str, Any]:
        """The same with the same arguments."""
        return self.call(method, dict.fromkeys(self.names, args))

    def _begin(self, name: str, method: str, args: tuple[Any, ...]) -> RemoteFuture | None:
        try:
            return self.worker.call_async(name, (SERVICE, method), args, timeout_s=min(_CALL_S, self._timeout_s))
        except CommunicationError:
            return None  # it is not there now

    def _finish_once(
        self, futures: dict[str, RemoteFuture | None], name: str, method: str, args: tuple[Any, ...]
    ) -> Any:
        future, futures[name] = futures[name], None
        if future is None:
            future = self.worker.call_async(name, (SERVICE, method), args, timeout_s=min(_CALL_S, self._timeout_s))
        return future.result()
