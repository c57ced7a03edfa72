"""One step of one rank, as it travels to the launcher: where its seconds went."""

from __future__ import annotations

import binascii
import math
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class StepRecord(NamedTuple):
    """One step. The parts add up to `step_s`; a part that was not measured is None.

    Of steps that were not looked at, forward, backward and optimizer are part of `other_s`.
    """

    step: int
    time: float
    """Wall-clock time of its end."""
    step_s: float
    """From the end of the step before to the end of this one."""
    forward_s: float | None
    backward_s: float | None
    optimizer_s: float | None
    wait_s: float | None
    """Waiting for other ranks; None where the backend cannot tell."""
    bubble_s: float | None
    data_s: float | None
    other_s: float
    loss: float | None = None
    num_samples: int | None = None
    is_skipped: bool = False
    preempted_s: float | None = None
    """Of its busy time, the seconds in which it was ready to run and other processes had its core."""

    @property
    def busy_s(self) -> float:
        """The time in which the rank waited for nobody and for no data."""
        return self.step_s - (self.wait_s or 0.0) - (self.data_s or 0.0) - (self.bubble_s or 0.0)

    @property
    def own_s(self) -> float:
        """The busy time that is the rank's own: without what others took of its core."""
        return max(0.0, self.busy_s - (self.preempted_s or 0.0))


def pack_steps(records: Iterable[StepRecord]) -> str:
    """Steps as one text for JSON, None as NaN: writing digits was a third of what a summary cost."""
    rows = [_LAYOUT.pack(*[math.nan if value is None else value for value in record]) for record in records]
    return binascii.b2a_base64(b"".join(rows), newline=False).decode("ascii")


def unpack_steps(text: Any, *, most: int) -> tuple[list[StepRecord], int]:
    """The newest of what another process packed, and how many of them are no steps."""
    if not isinstance(text, str):
        return [], int(text is not None)
    try:
        data = binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        return [], 1
    found: list[StepRecord] = []
    num_bad = int(len(data) % _LAYOUT.size != 0)
    rows = memoryview(data)[: len(data) // _LAYOUT.size * _LAYOUT.size][-most * _LAYOUT.size :]
    for row in _LAYOUT.iter_unpack(rows):
        values: list[Any] = [None if value != value else value for value in row]
        if math.inf in values or -math.inf in values or None in (values[0], values[1], values[2], values[_OTHER]):
            num_bad += 1
            continue
        values[0] = int(values[0])
        if values[_SAMPLES] is not None:
            values[_SAMPLES] = int(values[_SAMPLES])
        values[_SKIPPED] = bool(values[_SKIPPED])
        found.append(StepRecord._make(values))
    return found, num_bad


_LAYOUT = struct.Struct("<2d8f2d2f")
"""The fields in their order. Seconds have seven digits: a rank of a fast loop has hundreds of steps in a summary."""
_OTHER, _SAMPLES, _SKIPPED = map(StepRecord._fields.index, ("other_s", "num_samples", "is_skipped"))
PARTS: Sequence[str] = ("forward", "backward", "optimizer", "wait", "bubble", "data", "other")
"""The parts of a step, in the order in which they are shown."""


def share_of_steps(steps: Sequence[StepRecord], name: str) -> float | None:
    """The share of the steps' time that a part, such as `wait_s`, takes; None where a step did not measure it."""
    values = [getattr(step, name) for step in steps]
    total_s = sum(step.step_s for step in steps)
    return sum(values) / total_s if values and None not in values and total_s > 0 else None
