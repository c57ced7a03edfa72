"""Points that training passes: the start of a step, of its parts, of an operation, of a save.

Events tell what has happened; a watcher of points is called before it does, and what it raises is raised there. Fault
injection is the one user. Without a watcher a point checks one tuple.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

PointWatcher = Callable[[str, int | None], None]
"""Called with the point's name, and with the number of updates done where a step begins."""

_lock = threading.Lock()
# Replaced by a new tuple on every change, so that reading it needs no lock.
_watchers: tuple[PointWatcher, ...] = ()


def reached(point: str, step: int | None = None) -> None:
    """This process is about to do what `point` names: step, data, forward, backward, optimizer, save, all_reduce, …

    `step` is given with the point `step` alone: how many updates are done. Loops of one's own call
    `reached("step", number)` so that faults find their step.
    """
    for watcher in _watchers:
        watcher(point, step)


def watch_points(watcher: PointWatcher) -> Callable[[], None]:
    """Call `watcher` at every point of this process, in the thread that reaches it; returns what ends that."""
    global _watchers
    with _lock:
        _watchers = (*_watchers, watcher)

    def forget() -> None:
        global _watchers
        with _lock:
            _watchers = tuple(kept for kept in _watchers if kept is not watcher)

    return forget
