"""Lanes over real sockets: nothing waits where it may not, memory may be reused, descriptors come with their frame."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from torsh_distributed.comm.transport.event_loop import EventLoop
from torsh_distributed.comm.transport.frames import BadFrame, FrameLimits
from torsh_distributed.comm.transport.lane import Lane
from torsh_distributed.comm.transport.proof import ProvedSocket

LIMITS = FrameLimits(head_bytes=1000, payload_bytes=1 << 26)
MB = 1 << 20


def open_plainly(files: deque[int], head: memoryview, num_payload: int) -> tuple[Any, list[memoryview]]:
    payload = bytearray(num_payload)
    file = files.popleft() if bytes(head).startswith(b"file") else None
    return (bytes(head), payload, file), [memoryview(payload)]


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    found = EventLoop("test-loop")
    yield found
    found.close()


@pytest.fixture
def ends(loop: EventLoop) -> Iterator[tuple[Lane, Lane]]:
    both = [
        Lane(ProvedSocket(sock, None), LIMITS, open_plainly, loop, takes_files=True) for sock in socket.socketpair()
    ]
    yield both[0], both[1]
    for lane in both:
        lane.close()


def receive(lane: Lane, count: int) -> list[Any]:
    """Read until as many messages are there."""
    messages: list[Any] = []
    deadline_s = time.monotonic() + 20
    while len(messages) < count and time.monotonic() < deadline_s:
        messages += lane.receive()
    return messages


def test_a_sender_that_may_not_wait_leaves_a_copy_to_the_loop(ends: tuple[Lane, Lane]) -> None:
    memory = bytearray(b"x" * 4 * MB)
    ends[0].send(b"first", [memory])
    assert ends[0].num_unsent > 0
    ends[0].send(b"second")
    memory[:] = b"y" * len(memory)  # the caller goes on, and writes to it
    first, second = receive(ends[1], 2)
    assert (first[0], second[0]) == (b"first", b"second")
    assert first[1] == b"x" * 4 * MB


def test_a_sender_with_a_deadline_returns_when_the_kernel_has_it(ends: tuple[Lane, Lane]) -> None:
    arrived: list[Any] = []
    reading = threading.Thread(target=lambda: arrived.extend(receive(ends[1], 1)))
    reading.start()
    memory = bytearray(b"x" * 4 * MB)
    ends[0].send(b"head", [memory[:MB], memory[MB:]], deadline_s=time.monotonic() + 20)
    assert ends[0].num_unsent == 0
    memory[:] = b"y" * len(memory)
    reading.join(20)
    assert arrived[0][1] == b"x" * 4 * MB


def test_at_the_deadline_a_reader_that_does_not_read_costs_a_copy_and_the_stream_stays_whole(
    ends: tuple[Lane, Lane],
) -> None:
    memory = bytearray(b"x" * 4 * MB)
    ends[0].send(b"head", [memory], deadline_s=time.monotonic() + 0.05)
    assert ends[0].num_unsent > 0
    memory[:] = b"y" * len(memory)
    ends[0].send(b"next")
    first, second = receive(ends[1], 2)
    assert first[1] == b"x" * 4 * MB
    assert second[0] == b"next"


def test_who_waits_for_room_is_told_when_all_is_sent(ends: tuple[Lane, Lane]) -> None:
    drained = threading.Event()
    ends[0].on_drained = drained.set
    ends[0].send(b"head", [bytes(4 * MB)])
    assert not drained.is_set()
    receive(ends[1], 1)
    assert drained.wait(20)


def test_descriptors_arrive_with_their_frame_behind_others(ends: tuple[Lane, Lane]) -> None:
    ends[0].send(b"before", [bytes(2 * MB)])
    for text in (b"one", b"two"):
        file = os.memfd_create("test")
        os.write(file, text)
        ends[0].send(b"file " + text, file=file)
        os.close(file)
    ends[0].send(b"after")
    messages = receive(ends[1], 4)
    assert [message[0] for message in messages] == [b"before", b"file one", b"file two", b"after"]
    for message in messages[1:3]:
        assert os.pread(message[2], 10, 0) == message[0][5:]
        os.close(message[2])


def test_descriptors_that_nobody_speaks_of_end_the_connection(ends: tuple[Lane, Lane]) -> None:
    file = os.memfd_create("test")
    with pytest.raises(BadFrame, match="more file descriptors"):
        for _ in range(20):
            ends[0].send(b"head", file=file)
            receive(ends[1], 1)
    os.close(file)


def test_messages_before_the_end_are_delivered_and_the_end_says_where_it_was(ends: tuple[Lane, Lane]) -> None:
    ends[0].send(b"last")
    ends[0].close()
    assert [message[0] for message in receive(ends[1], 1)] == [b"last"]
    with pytest.raises(ConnectionResetError, match="between messages"):
        ends[1].receive()


def test_an_end_inside_a_frame_says_so(loop: EventLoop) -> None:
    mine, theirs = socket.socketpair()
    lane = Lane(ProvedSocket(mine, None), LIMITS, open_plainly, loop)
    theirs.sendall(b"\0\0\0\5\0\0\0\0\0\0\0\0he")
    theirs.close()
    assert lane.receive() == []
    with pytest.raises(ConnectionResetError, match="in the middle of a message"):
        lane.receive()
    lane.close()


def test_a_closed_lane_refuses_to_send(ends: tuple[Lane, Lane]) -> None:
    ends[0].close()
    with pytest.raises(ConnectionResetError):
        ends[0].send(b"head")


def test_the_loop_calls_back_at_moments_in_their_order_and_survives_errors(loop: EventLoop) -> None:
    called: list[int] = []
    done = threading.Event()
    now_s = time.monotonic()
    loop.call_at(now_s + 0.02, done.set)
    loop.call_at(now_s + 0.01, lambda: called.append(2))
    loop.call_at(now_s, lambda: called.append(1) or 1 / 0)  # type: ignore[func-returns-value]
    assert done.wait(20)
    assert called == [1, 2]
