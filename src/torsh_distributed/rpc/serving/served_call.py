"""A call at the callee: from its message to its answer, which may come later or in items."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, Protocol, cast

from torch.futures import Future as TorchFuture

from torsh_distributed.errors import InvalidArgument, OperationTimeout, TorshError
from torsh_distributed.rpc.messages.lane_pair import ERROR, ITEM, REPLY, STREAM
from torsh_distributed.rpc.messages.remote_errors import describe_error
from torsh_distributed.rpc.serving.exposed import Exposed

_TORCH_FUTURE = cast(type[TorchFuture[Any]], TorchFuture.__bases__[0])
"""What `then` returns."""
_current: contextvars.ContextVar[ServedCall | None] = contextvars.ContextVar("torsh_rpc_call", default=None)


def current_call() -> ServedCall | None:
    """The call that this function serves; None outside of one, and in inline functions, which take no time."""
    return _current.get()


class AnswerSender(Protocol):
    """Where answers go."""

    def answer(self, message: list[Any], *, deadline_s: float | None) -> None:
        """Send an answer. SerializationError if it cannot travel; nothing if the caller is gone."""

    def forget(self, call: ServedCall) -> None:
        """The call has been answered."""


class ServedCall:
    """What a function that serves a call can ask: who calls, how long it may take, whether it was given up."""

    def __init__(
        self,
        *,
        number: int,
        kind: int,
        caller: str,
        exposed: Exposed,
        function: Callable[..., Any],
        args: list[Any],
        kwargs: dict[str, Any],
        remaining_s: float,
        sender: AnswerSender,
        window: int,
    ) -> None:
        self.number = number
        self.caller = caller
        """The name of the worker that calls."""
        self.exposed = exposed
        self._kind = kind
        self._function = function
        self._args = args
        self._kwargs = kwargs
        self._deadline_s = time.monotonic() + remaining_s
        self._sender = sender
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._on_cancel: list[Callable[[], object]] = []
        self._has_begun = False
        self._has_ended = False
        self._items: Generator[Any, None, None] | None = None
        self._num_credits = window
        self._is_stepping = False
        self.keep: Callable[[Any], Any] = lambda value: value
        """What becomes of the result before it travels: `remote` keeps it here."""
        self.on_error: Callable[[BaseException], None] = lambda error: None
        """Told what the function raised."""
        self.run_later: Callable[[Callable[[], None]], None] = lambda job: job()

    @property
    def remaining_s(self) -> float:
        """Seconds until the caller gives up."""
        return self._deadline_s - time.monotonic()

    @property
    def is_cancelled(self) -> bool:
        """Whether the caller has given up, or its time is over: a long function looks here now and then."""
        return self._is_cancelled or self.remaining_s <= 0

    def on_cancel(self, callback: Callable[[], object]) -> None:
        """Call back once the caller gives up, on the thread that learns of it; at once if it has."""
        with self._lock:
            if not self._is_cancelled:
                self._on_cancel.append(callback)
                return
        callback()

    def cancel(self) -> None:
        """The caller has given up, or is gone."""
        with self._lock:
            self._is_cancelled = True
            callbacks, self._on_cancel = self._on_cancel, []
            closes = self._items is not None and not self._is_stepping
        for callback in callbacks:
            callback()
        if closes:
            self.run_later(self._step)

    def run(self) -> None:
        """Run the function and answer. Does not raise."""
        self._has_begun = True
        if self.is_cancelled:
            self._fail(
                OperationTimeout(
                    "the call's time was over before it could begin",
                    hint="the callee is busy: raise its num_threads, or the timeout",
                    operation=self.exposed.name,
                )
            )
            return
        token = _current.set(self)
        try:
            result = self._function(*self._args, **self._kwargs)
        except Exception as error:
            self._fail(error)
            return
        finally:
            _current.reset(token)
            self._args, self._kwargs = [], {}
        self.take(result)

    def take(self, result: Any) -> None:
        """Answer with what the function has returned, now or when it is done."""
        if isinstance(result, Future):
            result.add_done_callback(self._take_future)
            self.on_cancel(result.cancel)
        elif isinstance(result, _TORCH_FUTURE):
            result.add_done_callback(self._take_torch_future)
        elif isinstance(result, Generator):
            if self._kind != STREAM:
                result.close()
                self._fail(
                    InvalidArgument(
                        "this function yields its results", hint="call it with rpc.stream", name=self.exposed.name
                    )
                )
                return
            self._items = result
            self.more(0)
        elif self._kind == STREAM:
            self._refuse("this function yields nothing", "call it with rpc.call")
        else:
            self._reply(result)

    def _refuse(self, problem: str, hint: str) -> None:
        self._fail(InvalidArgument(problem, hint=hint, name=self.exposed.name))

    def _take_future(self, done: Future[Any]) -> None:
        if done.cancelled():
            self._fail(OperationTimeout("the call was given up", operation=self.exposed.name))
            return
        error = done.exception()
        if error is not None:
            self._fail(error)
        else:
            self._reply(done.result())

    def _take_torch_future(self, done: TorchFuture[Any]) -> None:
        try:
            value = done.value()
        except Exception as error:
            self._fail(error)
        else:
            self._reply(value)

    # Streams: the function goes on only while the caller has room, and no thread waits for it.

    def more(self, num_items: int) -> None:
        """The caller has room for more items."""
        with self._lock:
            self._num_credits += num_items
            if self._items is None or self._is_stepping or not self._num_credits:
                return
            self._is_stepping = True
        self.run_later(self._step)

    def _step(self) -> None:
        items = self._items
        assert items is not None, "only streams step"
        token = _current.set(self)
        try:
            while True:
                with self._lock:
                    if not self._is_cancelled and not self._num_credits:
                        self._is_stepping = False
                        return
                    self._num_credits -= 1
                if self.is_cancelled:
                    items.close()
                    self._end()
                    return
                self._sender.answer([ITEM, self.number, next(items)], deadline_s=self._deadline_s)
        except StopIteration:
            self._reply(None)
        except Exception as error:
            items.close()
            self._fail(error)
        finally:
            _current.reset(token)

    # Answers

    def _reply(self, value: Any) -> None:
        try:
            self._answer([REPLY, self.number, self.keep(value)])
        except TorshError as error:  # it cannot travel
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.on_error(error)
        self._answer([ERROR, self.number, describe_error(error)])

    def _answer(self, message: list[Any]) -> None:
        waits = not self.exposed.is_inline
        self._sender.answer(message, deadline_s=self._deadline_s if waits else None)
        self._end()

    def _end(self) -> None:
        with self._lock:
            if self._has_ended:
                return
            self._has_ended = True
            self._on_cancel.clear()  # a future's own would keep its result until the next collection
        self._sender.forget(self)
        if self._has_begun:
            self.exposed.end()
