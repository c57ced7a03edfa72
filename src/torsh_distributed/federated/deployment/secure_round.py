"""A round whose updates the server never sees: the steps of a secure sum with devices."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping

from torsh_distributed.errors import CommunicationError, ConfigurationError, InvalidArgument, SerializationError
from torsh_distributed.federated.privacy.secure_sum.sum_collector import SumCollector
from torsh_distributed.federated.privacy.secure_sum.sum_roster import SUM_STEPS
from torsh_distributed.federated.rounds.round_order import RoundReplies
from torsh_distributed.federated.update_sum import UpdateSum


class SumStep:
    """What devices were asked in one step. The server holds its lock around every call."""

    def __init__(self, devices: Iterable[str], take: Callable[[str, bytes], None], replies: RoundReplies) -> None:
        self._waiting = set(devices)
        self._take = take
        self._replies = replies

    @property
    def waiting(self) -> set[str]:
        """Devices that have not answered."""
        return set(self._waiting)

    def fail(self, device: str, reason: str) -> None:
        """The device is out of the sum, or its part in the later steps."""
        if device in self._waiting:
            self._waiting.discard(device)
            self._replies.failures[device] = reason

    def take(self, device: str, answer: bytes) -> None:
        """The device's answer."""
        self._replies.bytes_up += len(answer)
        try:
            self._take(device, answer)
        except (ConfigurationError, InvalidArgument, SerializationError) as error:
            self.fail(device, error.message)
        self._waiting.discard(device)


Exchange = Callable[[SumStep, str, Mapping[str, bytes], float], int]
"""Sends messages of a kind to devices and waits for answers, at most so many seconds; returns the bytes sent."""


def secure_round(
    collector: SumCollector, work: bytes, chosen: list[str], exchange: Exchange, deadline_s: float
) -> RoundReplies:
    """All steps. A sum that cannot be had is a round without updates, with the reason for every client.

    `deadline_s`: of the training, and of the four steps behind it together.
    """
    replies = RoundReplies()
    try:
        step = SumStep(chosen, collector.take_keys, replies)
        replies.bytes_down += exchange(step, "work", dict.fromkeys(chosen, work), deadline_s)
        end_s = time.monotonic() + deadline_s
        for kind in SUM_STEPS:
            messages = collector.messages(kind)
            step = SumStep(messages, functools.partial(collector.take, kind), replies)
            replies.bytes_down += exchange(step, kind, messages, max(0.0, end_s - time.monotonic()))
        steps, weight = collector.total()
    except (CommunicationError, ConfigurationError) as error:
        for client in chosen:
            replies.failures.setdefault(client, error.message)
        return replies
    for client in collector.delivered:
        replies.failures.pop(client, None)  # lost after its update was there: the update counts
    replies.total = UpdateSum.of(collector.to_values(steps), weight, len(collector.delivered))
    return replies
