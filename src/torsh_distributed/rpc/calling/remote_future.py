"""The result of a call that is under way: wait for it, await it, be called back, or cancel it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any, cast

from torch.futures import Future as TorchFuture
from typing_extensions import override

from torsh_distributed.comm.transport.event_loop import EventLoop
from torsh_distributed.rpc.calling.link import Link, PendingCall
from torsh_distributed.rpc.messages.lane_pair import STREAM_WINDOW


class RemoteFuture(Future[Any]):
    """A `concurrent.futures.Future` whose waiting thread reads the reply itself; it can also be awaited.

    At the call's deadline it fails with OperationTimeout, whether somebody waits or not.
    """

    def __init__(self, link: Link, pending: PendingCall, loop: EventLoop) -> None:
        super().__init__()
        self._link = link
        self._pending = pending
        self._loop = loop
        self._is_observed = False
        self._once = threading.Lock()
        pending.on_done = self._settle
        if pending.is_done:
            self._settle()

    def _settle(self) -> None:
        """The call has ended; from the thread that noticed it."""
        if not self._once.acquire(blocking=False):
            return
        if self._is_observed:
            self._link.unobserve()
        error, value = self._pending.error, self._pending.value
        # No cycle: a result goes with the last reference to it, not with the next collection.
        self._pending.on_done = self._pending.value = None
        if isinstance(error, CancelledError):
            super().cancel()
            self.set_running_or_notify_cancel()
        elif error is not None:
            self.set_exception(error)
        else:
            self.set_result(value)

    @override
    def result(self, timeout: float | None = None) -> Any:
        """The result, or what the call raised. With `timeout` (seconds) TimeoutError after it; the call goes on."""
        self._await(timeout)
        return super().result(timeout)

    @override
    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the call raised; None if nothing. Waits as `result` does."""
        self._await(timeout)
        return super().exception(timeout)

    def _await(self, timeout: float | None) -> None:
        if timeout is None and not super().done():
            self._link.settle(self._pending)
        elif not super().done():
            self._observe()

    @override
    def done(self) -> bool:
        """Whether it has ended; takes what has arrived."""
        if not super().done():
            self._link.poll()
        return super().done()

    @override
    def cancel(self) -> bool:
        """Give the call up and tell the callee; whether it was still under way."""
        if super().done():
            return False
        self._link.cancel(self._pending, CancelledError())
        return self.cancelled()

    @override
    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        """Call `fn` when it has ended, on the thread that noticed it: it must not block."""
        super().add_done_callback(fn)
        self._observe()

    def _observe(self) -> None:
        if self._is_observed or super().done():
            return
        self._is_observed = True
        self._link.observe()
        link, pending = self._link, self._pending  # the timer must not keep the result until the deadline
        self._loop.call_at(pending.deadline_s, lambda: link.expire(pending))
        if self._pending.is_done:
            self._link.poll()

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self).__await__()


class RemoteStream(Iterator[Any]):
    """The items of a call whose function yields, as they come. The callee waits while too many are unread."""

    def __init__(self, link: Link, pending: PendingCall) -> None:
        self._link = link
        self._pending = pending
        self._num_taken = 0

    @override
    def __next__(self) -> Any:
        if not self._link.wait_for_item(self._pending):
            raise StopIteration
        assert self._pending.items is not None, "it is a stream"
        item = self._pending.items.popleft()
        self._num_taken += 1
        if self._num_taken * 2 >= STREAM_WINDOW:
            self._link.ask_for_more(self._pending, self._num_taken)
            self._num_taken = 0
        return item

    def close(self) -> None:
        """Take no more items; the callee's function is ended at its next `yield`."""
        self._link.cancel(self._pending, CancelledError())

    def __enter__(self) -> RemoteStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def as_torch_future(future: RemoteFuture) -> TorchFuture[Any]:
    """A future of torch that ends with this one."""
    ended: TorchFuture[Any] = TorchFuture()

    def end(done: Any) -> None:
        error = done.exception()
        if error is None:
            ended.set_result(done.result())
        else:
            ended.set_exception(cast(Any, error))  # torch's stubs want a type variable

    future.add_done_callback(end)
    return ended
