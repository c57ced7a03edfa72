"""One step of one rank, as it travels to the launcher: where its seconds went."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torsh_distributed.errors import SerializationError


class StepRecord(NamedTuple):
    """One step. The parts add up to `step_s`; a part that was not measured is None.

    Of steps that were not looked at, forward and backward are part of `other_s`.
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

    def to_row(self) -> list[Any]:
        """As a JSON array, in the order of the fields."""
        # By hand: `astuple` copies deeply, and this is done for every step.
        parts = (
            self.step_s, self.forward_s, self.backward_s, self.optimizer_s, self.wait_s, self.bubble_s, self.data_s,
            self.other_s,
        )  # fmt: skip
        return [
            self.step,
            round(self.time, 6),
            *[None if seconds is None else round(seconds, 8) for seconds in parts],
            self.loss,
            self.num_samples,
            self.is_skipped,
            None if self.preempted_s is None else round(self.preempted_s, 8),
        ]

    @classmethod
    def from_row(cls, row: Any) -> StepRecord:
        """What `to_row` gave, which came from another process; raises SerializationError if it is something else."""
        if not isinstance(row, list) or len(row) != _NUM_FIELDS:
            raise SerializationError("a step that another process sent is not understood", got=repr(row)[:100])
        values = [*row]
        values[_SKIPPED] = None
        # Of many ranks this is done thousands of times a second: all types at once, and infinity minus itself is NaN.
        total = sum(filter(None, values)) if _NUMBERS.issuperset(map(type, values)) else math.nan
        if total - total != 0.0:
            raise SerializationError("a step that another process sent has no numbers", got=repr(row)[:100])
        if values[0] is None or values[1] is None or values[2] is None or values[9] is None:
            raise SerializationError("a step that another process sent has no time", got=repr(row)[:100])
        values[0] = int(values[0])
        values[_SKIPPED] = bool(row[_SKIPPED])
        return cls._make(values)


_NUM_FIELDS = len(StepRecord._fields)
_SKIPPED = StepRecord._fields.index("is_skipped")
_NUMBERS = frozenset((float, int, type(None)))
PARTS: Sequence[str] = ("forward", "backward", "optimizer", "wait", "bubble", "data", "other")
"""The parts of a step, in the order in which they are shown."""


def share_of_steps(steps: Sequence[StepRecord], name: str) -> float | None:
    """The share of the steps' time that a part, such as `wait_s`, takes; None where a step did not measure it."""
    values = [getattr(step, name) for step in steps]
    total_s = sum(step.step_s for step in steps)
    return sum(values) / total_s if values and None not in values and total_s > 0 else None
