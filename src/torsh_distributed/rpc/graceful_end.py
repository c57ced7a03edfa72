"""How workers end together: none leaves while another may still call it, and one that is lost is an error at once.

A wait in the store would not notice a worker that was killed, and would have no end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from torsh_distributed.errors import CommunicationError, InvalidArgument, OperationTimeout
from torsh_distributed.rpc.calling.remote_future import RemoteFuture
from torsh_distributed.rpc.directory import WorkerInfo

FOREVER_S = 1e9


class EndingWorker(Protocol):
    """The worker that waits."""

    info: WorkerInfo

    def call_async(self, to: Any, function: Any, args: Any = (), *, timeout_s: float | None = None) -> RemoteFuture:
        """Call a function of another worker."""

    def workers(self) -> list[WorkerInfo]:
        """All that are there now."""


class GracefulEnd:
    """Every worker tells worker 0 that it has come to its end; the reply goes out when all have. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._replies: list[Future[None]] = []
        self._is_over = False
        self._lost: CommunicationError | None = None

    # What other workers call: inline, so they must not wait.

    def arrive(self, num_workers: int) -> Future[None]:
        """At worker 0: one more worker has come."""
        reply: Future[None] = Future()
        with self._lock:
            self._replies.append(reply)
            is_last = len(self._replies) == num_workers
        if is_last or self._lost is not None:
            self._answer_all()
        return reply

    def stay(self) -> Future[None]:
        """Is never answered: worker 0 learns by its end that this worker is gone."""
        return Future()

    def _answer_all(self) -> None:
        with self._lock:
            self._is_over = True
            replies = list(self._replies)
        for reply in replies:
            if reply.done() or not reply.set_running_or_notify_cancel():
                continue
            if self._lost is None:
                reply.set_result(None)
            else:
                reply.set_exception(self._lost)

    # What this worker does

    def wait(self, worker: EndingWorker, num_workers: int, timeout_s: float) -> None:
        """Until as many workers have come; CommunicationError as soon as one is gone that has not."""
        try:
            reply = worker.call_async(0, "@arrive", (num_workers,), timeout_s=timeout_s)
        except InvalidArgument as error:  # its name is no longer there
            raise CommunicationError(
                "worker 0 has left without waiting for the others",
                hint="look at its output; or leave with rpc.shutdown(graceful=False) everywhere",
                num_workers=num_workers,
            ) from error
        watched = list(self._watch(worker, num_workers)) if worker.info.id == 0 else []
        try:
            reply.result()
        except OperationTimeout as error:
            raise OperationTimeout(
                "not all workers have come to their end in time",
                hint="each one calls rpc.shutdown(); rpc.shutdown(graceful=False) waits for nobody",
                num_workers=num_workers,
            ) from error
        finally:
            for call in watched:
                call.cancel()

    def _watch(self, worker: EndingWorker, num_workers: int) -> Iterable[RemoteFuture]:
        others = [info for info in worker.workers() if info.id != worker.info.id]
        if len(others) < num_workers - 1:
            self._lose("a worker", "it has left already")
        for info in others:
            try:
                call = worker.call_async(info, "@stay", timeout_s=FOREVER_S)
            except (CommunicationError, InvalidArgument) as error:
                self._lose(info.name, error.message)
            else:
                call.add_done_callback(partial(self._ended, info.name))
                yield call

    def _ended(self, name: str, call: Future[Any]) -> None:
        if not call.cancelled():
            self._lose(name, str(call.exception()).partition("\n")[0])

    def _lose(self, name: str, reason: str) -> None:
        with self._lock:
            if self._is_over:
                return  # all had come, and may leave
            self._lost = self._lost or CommunicationError(
                f"{name} is gone and never came to rpc.shutdown(): {reason}",
                hint="look at its output: it has failed, was killed, or left with graceful=False",
                worker=name,
            )
        self._answer_all()

    def functions(self) -> tuple[Callable[..., Future[None]], ...]:
        """What other workers call."""
        return (self.arrive, self.stay)
