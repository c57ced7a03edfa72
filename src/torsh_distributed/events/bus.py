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
_subscriptions: tuple[tuple[Handler, tuple[type[Event], ...], bool], ...] = ()
# What `wanted` has found out, of all events and of those made from notes; new after every change of subscriptions.
_answers: tuple[dict[type[Event], bool], dict[type[Event], bool]] = ({}, {})


def emit(event: Event, *, is_noted: bool = False) -> None:
    """Pass `event` to every subscriber of its type, in the caller's thread.

    If a handler raises, the error is logged and the others still run: observing never breaks training. An event that
    says what a note has said (`is_noted`) is not for subscribers that take notes.
    """
    if not _subscriptions:
        return
    for handler, types, takes_notes in _subscriptions:
        if (not types or isinstance(event, types)) and not (is_noted and takes_notes):
            try:
                handler(event)
            except Exception:
                _log.exception("an event handler failed on %s; training continues", type(event).__name__)


def wanted(kind: type[Event], *, is_noted: bool = False) -> bool:
    """Whether an event of this type has a subscriber; ask before building an expensive one."""
    answers = _answers[is_noted]
    answer = answers.get(kind)
    if answer is None:
        answer = answers[kind] = any(
            (not types or issubclass(kind, types)) and not (is_noted and takes_notes)
            for _, types, takes_notes in _subscriptions
        )
    return answer


def subscribe(handler: Handler, *types: type[Event], takes_notes: bool = False) -> Callable[[], None]:
    """Call `handler` for every event of `types` (default: all); returns a function that unsubscribes it.

    `takes_notes` is for who also takes notes (`step_notes`), which say the same as some events, and sooner.
    """
    global _subscriptions, _answers
    entry = (handler, types, takes_notes)
    with _lock:
        _subscriptions = (*_subscriptions, entry)
        _answers = ({}, {})

    def unsubscribe() -> None:
        global _subscriptions, _answers
        with _lock:
            _subscriptions = tuple(kept for kept in _subscriptions if kept is not entry)
            _answers = ({}, {})

    return unsubscribe
