"""A worker's side of the control plane: the views that the launcher sends, and what the worker tells it.

Messages come on the line's thread, which needs neither store nor group. A view that is urgent aborts every group at
once: whatever this process waits for in a collective, it is released to go on in the new world.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torsh_distributed.comm.groups.abort import abort_all
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.launch.worker.launcher_line import JOIN_VARIABLE, MEMBER_VARIABLE, LauncherLine, open_line


@dataclass(frozen=True)
class WorldView:
    """The members of the world in the order of their ranks, under an epoch that only grows."""

    epoch: int
    members: tuple[int, ...]
    is_urgent: bool
    """Whether a member is gone, so the present world does not work any more."""
    leaving: tuple[int, ...] = ()
    is_held: bool = False
    """Whether its members are too few: nobody enters it, and all wait for the next."""


class MembershipClient:
    """This worker's number, the newest view, and the line on which both travel."""

    def __init__(self, line: LauncherLine, member: int, *, joins: bool, first: WorldView) -> None:
        self.member = member
        self.joins = joins
        """Whether this worker was started later and is not in the world yet."""
        self.current = first
        """The view that this worker is in."""
        self._line = line
        self._newest = first
        self._released_epoch = first.epoch
        """Of the newest view for which the groups of older ones are aborted."""
        self._changed = threading.Condition()
        self._cancel: Callable[[], None] | None = None
        line.listen("view", self._take)

    @property
    def newest(self) -> WorldView:
        """The latest view that has arrived."""
        return self._newest

    @property
    def pending(self) -> WorldView | None:
        """A view that this worker has not entered yet."""
        newest = self._newest
        return newest if newest.epoch > self.current.epoch else None

    @property
    def is_interrupted(self) -> bool:
        """Whether the present world does not work any more."""
        pending = self.pending
        return pending is not None and pending.is_urgent

    def tell(self, what: str, **facts: Any) -> None:
        """Tell the launcher where this worker is."""
        self._line.send({"type": "elastic", "what": what, **facts})

    def await_view(self, timeout_s: float, *, is_wanted: Callable[[WorldView], bool]) -> WorldView | None:
        """The newest view that this worker has not entered, once there is one that is wanted; None at the deadline."""

        def found() -> bool:
            pending = self.pending
            return pending is not None and pending.epoch <= self._released_epoch and is_wanted(pending)

        with self._changed:
            return self.pending if self._changed.wait_for(found, timeout_s) else None

    def call_on_news(self, cancel: Callable[[], None] | None) -> None:
        """Call `cancel` on the line's thread if a newer view arrives; None ends that."""
        self._cancel = cancel

    def _take(self, message: dict[str, Any]) -> None:
        """On the line's thread: a new view."""
        view = WorldView(
            int(message["epoch"]),
            tuple(int(member) for member in message["members"]),
            bool(message["is_urgent"]),
            tuple(int(member) for member in message["leaving"]),
            bool(message.get("is_held", False)),
        )
        with self._changed:
            if view.epoch <= self._newest.epoch:
                return
            self._newest = view
        cancel = self._cancel
        if cancel is not None:
            cancel()
        if view.is_urgent and not self.joins:
            abort_all(f"the world changes to epoch {view.epoch}: {len(view.members)} workers")
        # Only now: who enters the view at once would have its new groups aborted.
        with self._changed:
            self._released_epoch = view.epoch
            self._changed.notify_all()


def open_membership(world_size: int) -> MembershipClient:
    """The control plane of this worker, which `torsh run --elastic` started in a world of `world_size`."""
    line = open_line()
    if line is None:
        raise ConfigurationError(
            "this worker has no line to its launcher, which an elastic job needs",
            hint="start it with `torsh run --elastic`, as a script or module",
        )
    joins = JOIN_VARIABLE in os.environ
    first = WorldView(-1 if joins else 0, () if joins else tuple(range(world_size)), is_urgent=False)
    return MembershipClient(line, int(os.environ[MEMBER_VARIABLE]), joins=joins, first=first)
