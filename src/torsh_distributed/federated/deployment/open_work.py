"""What devices are at work on: a round that all of them share, or buffered rounds that each has its own place in.

The server holds its lock around every call.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from torsh_distributed.federated.async_buffer import AsyncBuffer
from torsh_distributed.federated.federated_config import FederatedConfig
from torsh_distributed.federated.local_training import ClientUpdate
from torsh_distributed.federated.rounds.round_order import RoundOrder, RoundReplies, UpdateIntake


class SharedRound:
    """One order for all; each reply is looked at as it comes."""

    def __init__(self, intake: UpdateIntake, uploads: Mapping[str, str]) -> None:
        """`uploads`: the devices, and the codec of each one's update."""
        self._intake = intake
        self._uploads = uploads
        self._waiting = set(uploads)
        self.taken: dict[str, bytes] = {}
        """Devices whose update counts if the round does, and the nonce of it."""

    @property
    def waiting(self) -> set[str]:
        """Devices that have not answered."""
        return set(self._waiting)

    def fail(self, device: str, reason: str) -> None:
        """The device's work does not count."""
        if device in self._waiting:
            self._waiting.discard(device)
            self._intake.replies.failures[device] = reason

    def take(self, device: str, nonce: bytes, update: ClientUpdate, num_bytes: int) -> None:
        """The device's answer."""
        self._waiting.discard(device)
        if self._intake.take_message(update, self._uploads[device]):
            self.taken[device] = nonce
        self._intake.replies.bytes_up += num_bytes


class _DeviceWork(NamedTuple):
    order: RoundOrder
    deadline_s: float


class _DeviceAnswer(NamedTuple):
    device: str
    order: RoundOrder
    update: ClientUpdate | None
    problem: str
    nonce: bytes
    num_bytes: int


class BufferedWork:
    """An order for each device; replies wait here until the round loop takes them, also between two rounds."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._working: dict[str, _DeviceWork] = {}
        self._answers: deque[_DeviceAnswer] = deque()
        self.taken: dict[str, bytes] = {}
        """Devices of which an update counts, and the nonce of the last."""

    @property
    def waiting(self) -> set[str]:
        """Devices that have not answered."""
        return set(self._working)

    def begin(self, device: str, order: RoundOrder) -> None:
        """The device gets the order now."""
        self._working[device] = _DeviceWork(order, time.monotonic() + self._deadline_s)

    def fail(self, device: str, reason: str) -> None:
        """The device's work does not count."""
        work = self._working.pop(device, None)
        if work is not None:
            self._answers.append(_DeviceAnswer(device, work.order, None, reason, b"", 0))

    def take(self, device: str, nonce: bytes, update: ClientUpdate, num_bytes: int) -> None:
        """The device's answer."""
        self._answers.append(_DeviceAnswer(device, self._working.pop(device).order, update, "", nonce, num_bytes))

    def has_answers(self) -> bool:
        """Whether there is something to take."""
        return bool(self._answers)

    def expire(self) -> float:
        """Fail devices that are late; the seconds until the next one would be."""
        now_s = time.monotonic()
        for device in [name for name, work in self._working.items() if work.deadline_s <= now_s]:
            self.fail(device, "it did not answer in time")
        return min((work.deadline_s for work in self._working.values()), default=now_s) - now_s

    def take_answers(self, config: FederatedConfig, buffer: AsyncBuffer, round: int, wanted: int) -> RoundReplies:
        """Of those that have come, as many as are wanted for the step of a round."""
        replies = RoundReplies()
        while self._answers and replies.num_updates < wanted:
            answer = self._answers.popleft()
            staleness = round - answer.order.round
            scale = buffer.scale(staleness)
            intake = UpdateIntake(config.strategy, replace(answer.order, scale=scale), config.max_update_norm)
            if answer.update is None or not scale:
                intake.replies.failures[answer.device] = answer.problem or buffer.too_old(staleness)
            elif intake.take_message(answer.update):
                intake.replies.staleness = [staleness]
                self.taken[answer.device] = answer.nonce
            intake.replies.bytes_up = answer.num_bytes
            replies.merge(intake.replies)
        return replies
