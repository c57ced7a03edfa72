"""How long workers pause between steps so that a node's mean power stays under a cap, without touching any setting.

A pause of s times the time computed brings the power from P to idle + (P - idle) / (1 + s). So from the mean power
under a known s the s for any cap follows; it is computed again with every reading.
"""

from __future__ import annotations

from collections import deque

_WINDOW_S = 5.0
MOST_PAUSE = 20.0
"""A longer pause than that would be a stop; the cap is then below what the node takes when idle, or nearly."""


class PaceControl:
    """The pause, as a multiple of the time computed, that keeps the mean power at the cap."""

    def __init__(self, cap_w: float) -> None:
        self.cap_w = cap_w
        self.pause_share = 0.0
        self.idle_w = float("inf")
        """The least power of an interval so far."""
        self._computing_w: deque[tuple[float, float]] = deque()
        """(seconds, power that it would have been without pauses), over the last seconds."""

    @property
    def is_reachable(self) -> bool:
        """Whether pauses can bring the power under the cap."""
        return self.cap_w > self.idle_w

    def update(self, power_w: float, duration_s: float) -> float:
        """A reading of the node's power under the present pause; the pause from now on."""
        self.idle_w = min(self.idle_w, power_w)
        above_w = (power_w - self.idle_w) * (1 + self.pause_share)
        self._computing_w.append((duration_s, above_w))
        while sum(seconds for seconds, _ in self._computing_w) - self._computing_w[0][0] >= _WINDOW_S:
            self._computing_w.popleft()
        total_s = sum(seconds for seconds, _ in self._computing_w)
        mean_w = sum(seconds * watts for seconds, watts in self._computing_w) / total_s if total_s > 0 else 0.0
        room_w = self.cap_w - self.idle_w
        wanted = mean_w / room_w - 1 if room_w > 0 else MOST_PAUSE
        self.pause_share = min(MOST_PAUSE, max(0.0, wanted))
        return self.pause_share
