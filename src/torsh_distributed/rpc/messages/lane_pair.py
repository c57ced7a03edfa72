"""The two lanes between a caller and a callee, and what goes on which.

::

    hello   [HELLO, link, lane, name]                     first on every lane
    call    [CALL, id, target, seconds left, args, kwargs]   also STREAM; REMOTE has a reference at the end
            [CANCEL, id] · [MORE, id, items]
    answer  [REPLY, id, value] · [ERROR, id, facts] · [ITEM, id, value]

A target is an exposed name, or a reference and the name of a method. Answers come in any order, on the lane that fits
their size.
"""

from __future__ import annotations

import os
from functools import partial

from torsh_distributed.comm.transport.event_loop import EventLoop
from torsh_distributed.comm.transport.frames import FrameLimits
from torsh_distributed.comm.transport.lane import Lane
from torsh_distributed.comm.transport.proof import ProvedSocket
from torsh_distributed.errors import SerializationError
from torsh_distributed.rpc.messages.decoding import open_message
from torsh_distributed.rpc.messages.encoding import HEAD_BYTES, Encoded
from torsh_distributed.rpc.messages.payload_files import PayloadFiles, ReceivedFiles

PROTOCOL = b"TORSHRC1"
LANE_NAMES = ("small", "payload")
SMALL_BYTES = 1 << 16
"""Payloads below travel with the small messages."""
STREAM_WINDOW = 16
"""Items of a stream that may be on their way or unread."""
_FILE_BYTES = 1 << 20
"""From here on a memory file is faster than a socket, on one node."""
HELLO, CALL, STREAM, REMOTE, CANCEL, MORE, REPLY, ERROR, ITEM = range(9)
"""What a message is: its first part."""


def small_limits() -> FrameLimits:
    """Of the lane of small messages."""
    return FrameLimits(head_bytes=HEAD_BYTES, payload_bytes=SMALL_BYTES)


def payload_limits(most_payload_bytes: int) -> FrameLimits:
    """Of the lane of payloads."""
    return FrameLimits(head_bytes=HEAD_BYTES, payload_bytes=most_payload_bytes)


class LanePair:
    """Sends messages on the lane that fits them."""

    def __init__(self, most_payload_bytes: int) -> None:
        self.small: Lane | None = None
        self.payload: Lane | None = None
        self._most_payload_bytes = most_payload_bytes
        self._sent_files = PayloadFiles()
        self._received_files = ReceivedFiles()

    def add(self, proved: ProvedSocket, name: str, loop: EventLoop) -> Lane:
        """Make the lane of that name of a connection; `loop` is where it reads."""
        limits = small_limits() if name == "small" else payload_limits(self._most_payload_bytes)
        opening = partial(open_message, self._received_files)
        lane = Lane(proved, limits, opening, loop, takes_files=name == "payload")
        setattr(self, name, lane)
        return lane

    def lanes(self) -> list[Lane]:
        """Those that are there."""
        return [lane for lane in (self.small, self.payload) if lane is not None]

    @property
    def num_unsent(self) -> int:
        """Bytes that wait for the other end to read."""
        num_small = 0 if self.small is None else self.small.num_unsent
        return num_small if self.payload is None else num_small + self.payload.num_unsent

    def send(self, encoded: Encoded, deadline_s: float | None) -> None:
        """Returns when the kernel has all of it, or at the deadline; without one it does not wait."""
        small, payload = self.small, self.payload
        if small is None or payload is None:
            raise ConnectionResetError("the connection has only one lane yet")
        num_bytes = encoded.num_payload
        if num_bytes <= SMALL_BYTES:
            small.send(encoded.head(), encoded.parts, deadline_s=deadline_s)
            return
        if num_bytes > self._most_payload_bytes:
            raise SerializationError(
                "the tensors of a call take more bytes than are allowed",
                hint="send them in several calls, or start both workers with a larger most_payload_bytes",
                num_bytes=num_bytes,
                most_payload_bytes=self._most_payload_bytes,
            )
        file = self._file_of(encoded) if payload.takes_files and num_bytes >= _FILE_BYTES else None
        if file is None:
            payload.send(encoded.head(), encoded.parts, deadline_s=deadline_s)
            return
        try:
            payload.send(encoded.head(is_file=True), deadline_s=deadline_s, file=file)
        finally:
            os.close(file)

    def close(self) -> None:
        """Close both."""
        for lane in self.lanes():
            lane.close()

    def drop_idle(self) -> None:
        """Give memory back that large payloads went through some time ago."""
        self._sent_files.drop_idle()
        self._received_files.drop_idle()

    def _file_of(self, encoded: Encoded) -> int | None:
        try:
            return self._sent_files.send(encoded.parts)
        except OSError:  # no room for a second copy: a socket needs none
            return None
