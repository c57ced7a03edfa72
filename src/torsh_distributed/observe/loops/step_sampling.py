"""Which steps of a plain loop are looked at in detail: as many as cost next to nothing."""

from __future__ import annotations

_DETAIL_S = 0.35e-3
"""What it costs to see the forward, the backward and the loss of a step, measured between the operations of a model."""
_SHARE = 0.0005
_LONGEST = 256
_FIRST_STEPS = 4
"""The model is found in the second one; the first ones allocate and compile."""


class StepSampling:
    """A step in so many that looking costs a twentieth of a per cent: of steps of 700 ms all, of 30 ms each 32nd.

    The interval is a power of two and steps are chosen by their number, so ranks choose the same ones without talking.
    """

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None
        self._usual_s: float | None = None

    def add(self, step: int, now_s: float) -> None:
        """That step ended now; steps between two calls count by their mean."""
        if self._last is not None and step > self._last[0]:
            self._usual_s = (now_s - self._last[1]) / (step - self._last[0])
        self._last = (step, now_s)

    @property
    def interval(self) -> int:
        """One step of how many is looked at."""
        interval = 1
        while self._usual_s is not None and interval < _LONGEST and interval * _SHARE * self._usual_s < _DETAIL_S:
            interval *= 2
        return interval

    def next_step(self, step: int) -> int:
        """The next one after `step` that is looked at."""
        interval = self.interval if step >= _FIRST_STEPS else 1
        # Soon after a power of ten as well: operations are counted there.
        counted = 1
        while counted + 1 <= step:
            counted *= 10
        return min((step // interval + 1) * interval, counted + 1)
