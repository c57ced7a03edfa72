"""Control messages between the ranks of a group: one aborts, leaves, or has waited for long.

Why: MPI cannot abort a single group, and a waiting rank cannot tell a slow peer from an absent one. Notices are small
messages under their own tag; ranks read them after waiting for a while, never on the fast path.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from torsh_distributed.comm.backends.mpi.library import MpiLibrary

if TYPE_CHECKING:
    from mpi4py import MPI

_log = logging.getLogger(__name__)
_MESSAGE_BYTES = 1024
_MAX_REASON_CHARS = 120


class NoticeKind(StrEnum):
    """What a notice says."""

    ABORT = "abort"
    LEFT = "left"
    WAITING = "waiting"


@dataclass(frozen=True, slots=True)
class GroupEnd:
    """Why a group does not work any more: the rank that ended it first, and its reason."""

    origin: int
    reason: str


@dataclass(frozen=True, slots=True)
class _Departure:
    """A rank that left: how many collectives it had done, and when this rank learned of it."""

    num_collectives: int
    heard_s: float


class ControlChannel:
    """One rank's side: sends notices to all others and keeps theirs."""

    def __init__(self, library: MpiLibrary, comm: MPI.Intracomm, *, tag: int, group_id: str) -> None:
        self._library = library
        self._comm = comm
        self._tag = tag
        # A communicator's number is reused once freed: a late notice of an older group must not count.
        self._group_id = group_id
        self._rank = comm.Get_rank()
        self._peers = [rank for rank in range(comm.Get_size()) if rank != self._rank]
        self.released = threading.Event()
        """Set when the group ends; threads that sleep for the group wait on it."""
        self.ending: GroupEnd | None = None
        self._left: dict[int, _Departure] = {}
        self._waiting: dict[int, int] = {}
        self._sent: deque[tuple[MPI.Request, bytes]] = deque()
        self._turn = threading.Lock()
        self._inbox = bytearray(_MESSAGE_BYTES)
        self._request: MPI.Request | None = self._listen()

    def _listen(self) -> MPI.Request:
        any_source = self._library.mpi.ANY_SOURCE
        return self._comm.Irecv((self._inbox, self._library.mpi.BYTE), source=any_source, tag=self._tag)

    def abort(self, reason: str) -> None:
        """End the group here and notify the others; the first reason stays. Lock-free, for signal handlers."""
        if self.ending is not None:
            return
        self.ending = GroupEnd(self._rank, reason)
        self.released.set()
        self._tell(self._peers, NoticeKind.ABORT, reason=reason)

    def leave(self, num_collectives: int) -> None:
        """Notify the ranks that are still in the group."""
        self.look()
        self._tell([rank for rank in self._peers if rank not in self._left], NoticeKind.LEFT, sequence=num_collectives)

    def say_waiting(self, sequence: int) -> None:
        """Notify the others that this rank waits in its collective number `sequence`."""
        self._tell(self._peers, NoticeKind.WAITING, sequence=sequence)

    def absent(self, sequence: int) -> list[int]:
        """Ranks that have not announced that collective or a later one."""
        return [rank for rank in self._peers if self._waiting.get(rank, -1) < sequence]

    def gone_before(self, sequence: int) -> int | None:
        """A rank that left before that collective."""
        return next((rank for rank, gone in self._left.items() if gone.num_collectives < sequence), None)

    def gone_for(self, peer: int | None, time_s: float) -> int | None:
        """The peer, or without one the last of all ranks, if it left at least `time_s` seconds ago."""
        if peer is None:
            peer = max(self._left, key=lambda rank: self._left[rank].heard_s) if self._is_alone else -1
        departure = self._left.get(peer)
        return peer if departure is not None and time.monotonic() - departure.heard_s >= time_s else None

    @property
    def _is_alone(self) -> bool:
        return 0 < len(self._peers) == len(self._left)

    def _tell(self, ranks: Iterable[int], kind: NoticeKind, *, sequence: int = 0, reason: str = "") -> None:
        if not self._library.is_usable:
            return
        notice = {"group": self._group_id, "kind": kind, "sequence": sequence, "reason": reason[:_MAX_REASON_CHARS]}
        message = json.dumps(notice, ensure_ascii=False).encode()
        for rank in ranks:
            try:
                request = self._comm.Isend((message, self._library.mpi.BYTE), dest=rank, tag=self._tag)
            except self._library.mpi.Exception as error:
                # The peer may be gone. This rank continues regardless; the peer has its own deadline.
                _log.warning("cannot send the notice to rank %d that this rank says %s: %s", rank, kind, error)
                continue
            self._sent.append((request, message))

    def look(self) -> None:
        """Read the notices that have arrived."""
        if not self._turn.acquire(blocking=False):
            return  # another thread does this already
        try:
            status = self._library.mpi.Status()
            while self._request is not None and self._request.Test(status):
                message = bytes(self._inbox[: status.Get_count()])
                self._request = self._listen()
                self._take(status.Get_source(), message)
            self._forget_delivered()
        finally:
            self._turn.release()

    def _forget_delivered(self) -> None:
        for _ in range(len(self._sent)):
            entry = self._sent.popleft()
            if not entry[0].Test():
                self._sent.append(entry)

    def _take(self, origin: int, message: bytes) -> None:
        notice = json.loads(message)
        if notice["group"] != self._group_id:
            return
        match NoticeKind(notice["kind"]):
            case NoticeKind.ABORT:
                if self.ending is None:
                    self.ending = GroupEnd(origin, notice["reason"])
                self.released.set()
            case NoticeKind.LEFT:
                self._left[origin] = _Departure(notice["sequence"], time.monotonic())
            case NoticeKind.WAITING:
                self._waiting[origin] = notice["sequence"]

    def close(self) -> bool:
        """Stop listening; whether all notices of this rank were delivered."""
        self.released.set()
        with self._turn:
            if self._request is not None:
                self._request.Cancel()
                self._request.Wait()  # a cancelled receive ends at once
                self._request = None
            self._forget_delivered()
            if self._sent:
                self._library.abandon(self._sent)
            return not self._sent
