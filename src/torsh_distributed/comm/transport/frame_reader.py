"""Frames from a stream, whatever pieces it arrives in: payloads are received into the memory where they stay.

Pure: it says where the next bytes go (`room`) and is told how many came (`take`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torsh_distributed.comm.transport.frames import LENGTHS_BYTES, BadFrame, Frames

OpenHead = Callable[[memoryview, int], tuple[Any, Sequence[memoryview]]]
"""From a head and the bytes of its payload to a message and the memory that the payload goes to, part by part.

Called before any byte of the payload is placed; the head's memory is reused afterwards.
"""
_BUFFER_BYTES = 1 << 16


class FrameReader:
    """Takes what arrives on one connection; raises BadFrame at the first that is not a frame."""

    def __init__(self, frames: Frames, open_head: OpenHead) -> None:
        self._frames = frames
        self._open_head = open_head
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._end = 0
        """The bytes of the buffer that are not parsed yet."""
        self._message: Any = None
        self._parts: list[memoryview] = []
        """The payload of `_message`; empty if none is awaited."""
        self._unfilled: list[memoryview] = []

    @property
    def is_between_frames(self) -> bool:
        """Whether the stream may end here."""
        return not self._parts and self._start == self._end

    def room(self) -> memoryview:
        """Where the next bytes go: into the payload itself, once its head is read. Never empty."""
        return self._unfilled[0] if self._unfilled else self._buffer[self._end :]

    def take(self, num_bytes: int) -> list[Any]:
        """`num_bytes` were written to `room`: the messages that they complete."""
        if self._unfilled:
            self._fill(num_bytes)
            if self._unfilled:
                return []
        else:
            self._end += num_bytes
        messages: list[Any] = []
        while self._take_next(messages):
            pass
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._buffer) > _BUFFER_BYTES:
                self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        elif self._end == len(self._buffer):
            self._make_room(0)
        return messages

    def _take_next(self, messages: list[Any]) -> bool:
        """Parse on; whether there may be more to parse."""
        if self._parts:
            return self._end_payload(messages)
        start = self._start
        head_start = start + LENGTHS_BYTES
        if self._end < head_start:
            return False
        frames, buffer = self._frames, self._buffer
        num_head, num_payload = frames.lengths(buffer, start)
        head_end = head_start + num_head
        end = head_end + frames.signature_bytes
        if self._end < end:
            self._make_room(end - start)
            return False
        head = buffer[head_start:head_end]
        if end > head_end:
            frames.check_head(buffer[start:head_start], head, buffer[head_end:end])
        message, places = self._open_head(head, num_payload)
        self._start = end
        if not num_payload:
            messages.append(message)
            return end < self._end
        self._parts = [part for part in places if part]
        num_placed = sum(map(len, self._parts))
        if num_placed != num_payload:
            raise BadFrame(f"a payload of {num_payload} bytes where {num_placed} were expected")
        self._message, self._unfilled = message, list(self._parts)
        self._fill_from_buffer()
        return not self._unfilled

    def _end_payload(self, messages: list[Any]) -> bool:
        """The payload is complete: check its signature, once that is here."""
        num_bytes = self._frames.signature_bytes
        if self._end - self._start < num_bytes:
            return False
        if num_bytes:
            self._frames.check_payload(self._buffer[self._start : self._start + num_bytes], *self._parts)
        self._start += num_bytes
        messages.append(self._message)
        self._message, self._parts = None, []
        return True

    def _fill_from_buffer(self) -> None:
        """The part of a payload that came with its head."""
        while self._unfilled and self._start < self._end:
            num_bytes = min(len(self._unfilled[0]), self._end - self._start)
            self._unfilled[0][:num_bytes] = self._buffer[self._start : self._start + num_bytes]
            self._start += num_bytes
            self._fill(num_bytes)

    def _fill(self, num_bytes: int) -> None:
        rest = self._unfilled[0][num_bytes:]
        if rest:
            self._unfilled[0] = rest
        else:
            del self._unfilled[0]

    def _make_room(self, num_bytes: int) -> None:
        """Move what is not parsed to the beginning of a buffer for a frame of `num_bytes`, whose length was checked."""
        if len(self._buffer) - self._start >= max(num_bytes, 1) and self._end < len(self._buffer):
            return
        kept = bytes(self._buffer[self._start : self._end])
        if num_bytes > len(self._buffer):
            self._buffer = memoryview(bytearray(num_bytes))
        self._start, self._end = 0, len(kept)
        self._buffer[: self._end] = kept
