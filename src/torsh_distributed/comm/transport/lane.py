"""One end of a connection that never blocks: frames arrive in pieces, and what cannot be sent yet waits here.

A link between two processes has two lanes, one for small messages and one for payloads, so that a ping does not wait
behind 64 MB.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from torsh_distributed.comm.transport.event_loop import EventLoop
from torsh_distributed.comm.transport.frame_reader import FrameReader
from torsh_distributed.comm.transport.frames import BadFrame, Buffer, FrameLimits, Frames
from torsh_distributed.comm.transport.proof import ProvedSocket
from torsh_distributed.comm.trust.job_secret import peer_uid

if TYPE_CHECKING:
    import ssl

OpenMessage = Callable[[deque[int], memoryview, int], tuple[Any, Sequence[memoryview]]]
"""As `OpenHead`, after the descriptors that have arrived and were not taken yet."""
_MOST_PARTS = 64
_MOST_FILES = 16
"""Descriptors that arrived before the heads that speak of them; more are nobody's."""
_FILE_SPACE = socket.CMSG_SPACE(array.array("i", [0]).itemsize)
_WOULD_BLOCK = (BlockingIOError, InterruptedError)


class Lane:
    """Errors are OSError; after one the lane is of no use. Any thread sends; one at a time receives."""

    def __init__(
        self,
        proved: ProvedSocket,
        limits: FrameLimits,
        open_message: OpenMessage,
        loop: EventLoop,
        *,
        takes_files: bool = False,
    ) -> None:
        """`loop` sends what callers that may not wait leave behind, and reads if `watch` says so.

        `takes_files`: descriptors may be handed over, between processes of one user of a node; reads are slower then.
        """
        sock = proved.sock
        sock.setblocking(False)
        self.takes_files = takes_files and peer_uid(sock) == os.geteuid()
        """Whether descriptors can be handed over."""
        self._raw = sock
        self._sock: socket.socket | _EncryptedSocket = sock
        self._is_encrypted = hasattr(sock, "do_handshake")
        if self._is_encrypted:
            self._sock = _EncryptedSocket(cast("ssl.SSLSocket", sock))
        self._fd = sock.fileno()
        self._frames = Frames(proved.signers, limits)
        self._files: deque[int] = deque()
        self._reader = FrameReader(self._frames, partial(open_message, self._files))
        self._receive_into = self._receive_with_files if self.takes_files else self._sock.recv_into
        self.loop = loop
        self.on_drained: Callable[[], None] | None = None
        """Called when everything that had to wait is sent."""
        self._lock = threading.Lock()
        self._unsent: deque[memoryview] = deque()
        self._num_unsent = 0
        self._num_queued = 0
        """Of all bytes ever, sent or not: a place in the stream."""
        self._unsent_files: deque[tuple[int, int]] = deque()
        """(place in the stream, descriptor that goes with the byte there)"""
        self._on_readable: Callable[[], None] | None = None
        self._mask = 0
        self._is_closed = False
        self._end: OSError | None = None

    def fileno(self) -> int:
        """For polling."""
        return self._fd

    @property
    def num_unsent(self) -> int:
        """Bytes that wait for the other end to read."""
        return self._num_unsent

    def watch(self, on_readable: Callable[[], None] | None) -> None:
        """Have the loop call `on_readable` whenever something arrives; None: no more."""
        with self._lock:
            self._on_readable = on_readable
            self._watch()

    def send(
        self, head: Buffer, parts: Sequence[Buffer] = (), *, deadline_s: float | None = None, file: int | None = None
    ) -> None:
        """Send a frame from the memory of its parts, which may change afterwards.

        With a deadline this returns when the kernel has all of it; at the deadline, or without one, what is left is
        copied and sent later. `file` is a descriptor that goes along, on Unix sockets; the caller closes its own.
        """
        with self._lock:
            if self._is_closed:
                raise ConnectionResetError("the connection is closed")
            if not parts and not self._unsent and file is None:
                frame = self._frames.seal_head(head)
                try:
                    num_sent = self._sock.send(frame)
                except _WOULD_BLOCK:
                    num_sent = 0
                self._num_queued += num_sent
                if num_sent < len(frame):
                    self._queue([memoryview(frame)[num_sent:]])
                    self._watch()
                return
            views = [memoryview(part) for part in self._frames.seal(head, parts)]
            if file is not None:
                self._unsent_files.append((self._num_queued, os.dup(file)))
            self._queue(views)
            self._flush()
            if not self._unsent:
                return
        if deadline_s is not None:
            self._wait_until_sent(views[-1], deadline_s)
        with self._lock:
            self._keep_copies()
            self._watch()
            is_drained = not self._unsent
        if is_drained and self.on_drained is not None:
            self.on_drained()

    def _queue(self, views: list[memoryview]) -> None:
        num_bytes = sum(map(len, views))
        self._unsent.extend(views)
        self._num_unsent += num_bytes
        self._num_queued += num_bytes

    def _wait_until_sent(self, last: memoryview, deadline_s: float) -> None:
        poller = select.poll()
        poller.register(self._fd, select.POLLOUT)
        while (remaining_s := deadline_s - time.monotonic()) > 0:
            poller.poll(min(remaining_s, 1e6) * 1000 + 1)
            with self._lock:
                self._flush()
                if not any(view.obj is last.obj for view in self._unsent):
                    return

    def _keep_copies(self) -> None:
        """The caller goes on, and may write to what was not sent."""
        for index, view in enumerate(self._unsent):
            if not isinstance(view.obj, bytes):
                self._unsent[index] = memoryview(bytes(view))

    def _flush(self) -> None:
        """Send what the socket takes now."""
        unsent = self._unsent
        while unsent:
            try:
                num_sent = self._send_some()
            except _WOULD_BLOCK:
                return
            self._num_unsent -= num_sent
            while unsent and num_sent >= len(unsent[0]):
                num_sent -= len(unsent.popleft())
            if num_sent:
                unsent[0] = unsent[0][num_sent:]

    def _send_some(self) -> int:
        """One call of the kernel: up to the place that a descriptor belongs to, or with it."""
        if isinstance(self._sock, _EncryptedSocket):
            return self._sock.send(self._unsent[0])
        place = self._num_queued - self._num_unsent
        if self._unsent_files and self._unsent_files[0][0] == place:
            file = self._unsent_files[0][1]
            message = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file]))]
            num_sent = self._sock.sendmsg([self._unsent[0]], message)
            self._unsent_files.popleft()
            os.close(file)
            return num_sent
        parts = list(itertools.islice(self._unsent, _MOST_PARTS))
        if self._unsent_files:
            limit = self._unsent_files[0][0]
            while place + sum(map(len, parts)) > limit:
                parts.pop()
        return self._sock.sendmsg(parts)

    def receive(self) -> list[Any]:
        """The messages that have arrived; does not wait. Raises when the stream has ended and all are taken."""
        if self._end is not None:
            raise self._end
        messages: list[Any] = []
        try:
            while True:
                room = self._reader.room()
                num_bytes = self._receive_into(room)
                if not num_bytes:
                    where = "between messages" if self._reader.is_between_frames else "in the middle of a message"
                    raise ConnectionResetError(f"the other end closed the connection {where}")
                messages += self._reader.take(num_bytes)
                if num_bytes < len(room) and not self._is_encrypted:
                    return messages
        except _WOULD_BLOCK:
            return messages
        except OSError as error:
            if not messages:
                raise
            self._end = error
            return messages

    def _receive_with_files(self, room: memoryview) -> int:
        assert isinstance(self._sock, socket.socket), "TLS is not for Unix sockets"
        num_bytes, ancillary, _, _ = self._sock.recvmsg_into([room], _FILE_SPACE, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._files.extend(array.array("i", data[: len(data) - len(data) % 4]))
        if len(self._files) > _MOST_FILES:
            raise BadFrame("more file descriptors than messages that announce them")
        return num_bytes

    def _watch(self) -> None:
        """Tell the loop what to wait for; under the lock."""
        mask = (select.EPOLLIN if self._on_readable else 0) | (select.EPOLLOUT if self._unsent else 0)
        if mask != self._mask and not self._is_closed:
            self._mask = mask
            self.loop.watch(self._fd, mask, self._is_ready)

    def _is_ready(self, mask: int) -> None:
        """Called by the loop."""
        if mask & select.EPOLLOUT:
            with self._lock:
                if self._is_closed:
                    return
                with contextlib.suppress(OSError):  # who reads finds out, and says so
                    self._flush()
                self._watch()
                is_drained = not self._unsent
            if is_drained and self.on_drained is not None:
                self.on_drained()
        on_readable = self._on_readable
        if mask & ~select.EPOLLOUT and on_readable is not None:
            on_readable()

    def close(self) -> None:
        """Close at once; who polls it is woken."""
        with self._lock:
            if self._is_closed:
                return
            if self._mask:
                self.loop.watch(self._fd, 0, self._is_ready)
            self._is_closed = True
            files = [*self._files, *(file for _, file in self._unsent_files)]
            self._unsent.clear()
            self._unsent_files.clear()
            self._num_unsent = 0
            with contextlib.suppress(OSError):  # the other end was first
                # Of the socket itself: TLS's own would let a later call go on in the clear.
                socket.socket.shutdown(self._raw, socket.SHUT_RDWR)
            self._raw.close()
        for file in files:
            os.close(file)


class _EncryptedSocket:
    """A socket under TLS with a plain one's calls: BlockingIOError where it has to wait, one call at a time."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        import ssl

        self._sock = sock
        self._lock = threading.Lock()  # OpenSSL's state is one for both directions
        self._waits = (ssl.SSLWantReadError, ssl.SSLWantWriteError)

    def send(self, data: Buffer) -> int:
        with self._lock:
            try:
                return self._sock.send(data)
            except self._waits:
                raise BlockingIOError from None

    def recv_into(self, room: memoryview) -> int:
        with self._lock:
            try:
                return self._sock.recv_into(room)
            except self._waits:
                raise BlockingIOError from None
