"""The event bus: the only instrumentation point of the library.

Layers emit what happened; metrics, traces and dashboards subscribe. Without a subscriber, emitting checks one tuple, so
instrumentation can stay in the hot path; if building the event is expensive, ask `wanted` first.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from torsh_distributed.events.types import Event

Handler = Callable[[Event], None]

_log = logging.getLogger(__name__)
_lock = threading.Lock()
# Replaced by a new tuple on every change, so emit reads it without a lock.
_subscriptions: tuple[tuple[Handler, tuple[type[Event], ...]], ...] = ()


def emit(event: Event) -> None:
    """Pass `event` to every subscriber of its type, in the caller's thread.

    If a handler raises, the error is logged and the others still run: observing never breaks training.
    """
    if not _subscriptions:
        return
    for handler, types in _subscriptions:
        if not types or isinstance(event, types):
            try:
                handler(event)
            except Exception:
                _log.exception("an event handler failed on %s; training continues", type(event).__name__)


def wanted(kind: type[Event]) -> bool:
    """Whether an event of this type has a subscriber; ask before building an expensive one."""
    if not _subscriptions:
        return False
    return any(not types or issubclass(kind, types) for _, types in _subscriptions)


def subscribe(handler: Handler, *types: type[Event]) -> Callable[[], None]:
    """Call `handler` for every event of `types` (default: all); returns a function that unsubscribes it."""
    global _subscriptions
    entry = (handler, types)
    with _lock:
        _subscriptions = (*_subscriptions, entry)

    def unsubscribe() -> None:
        global _subscriptions
        with _lock:
            _subscriptions = tuple(kept for kept in _subscriptions if kept is not entry)

    return unsubscribe
