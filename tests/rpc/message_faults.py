"""Faults of chosen messages: one is lost on its way, or arrives and is reported as lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import msgpack

from torsh_distributed.rpc.messages.encoding import Encoded
from torsh_distributed.rpc.messages.lane_pair import LanePair

MessageFault = Literal["request lost", "reply lost", "delivered but reported lost"]
FAULTS: tuple[MessageFault, ...] = ("request lost", "reply lost", "delivered but reported lost")


@contextmanager
def failing(
    fault: MessageFault, requests: int, replies: tuple[int, ...], hits: Callable[[], bool]
) -> Iterator[list[int]]:
    """Inside, messages of these kinds fail in this way whenever `hits` says so; yields the numbers of those calls."""
    send, failed = LanePair.send, list[int]()

    def send_or_fail(pair: LanePair, encoded: Encoded, deadline_s: float | None) -> None:
        kind, number, *_ = msgpack.unpackb(encoded.body, ext_hook=lambda code, data: None, strict_map_key=False)
        wanted = replies if fault == "reply lost" else (requests,)
        if kind not in wanted or not hits():
            send(pair, encoded, deadline_s)
            return
        failed.append(number)
        if fault == "delivered but reported lost":
            send(pair, encoded, deadline_s)
            raise ConnectionResetError("a fault of a test")

    LanePair.send = send_or_fail  # type: ignore[method-assign]
    try:
        yield failed
    finally:
        LanePair.send = send  # type: ignore[method-assign]


def once() -> Callable[[], bool]:
    """The first message alone."""
    left: Any = iter([True])
    return lambda: next(left, False)
