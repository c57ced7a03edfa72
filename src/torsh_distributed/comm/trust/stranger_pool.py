"""Connections that have not proved the job's secret: few, for a short time, and reported in one line.

Why: whoever reaches the port may open as many connections as he likes. A member proves the secret within
milliseconds, so a stranger loses nothing but his own place: when the pool is full, the oldest connection of the address
with the most of them is closed, and a member's address rarely has two.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)

PROOF_TIMEOUT_S = 3.0
"""The time a connection has to prove the secret."""
_FEWEST_PLACES, _MOST_PLACES = 64, 1024
_SHARE_OF_FILES = 8
_FIRST_SUMMARY_S = 0.5
_NEXT_SUMMARY_S = 60.0


class StrangerPool(Generic[C]):
    """Who is being asked for a proof, and what became of those who had none. Pure."""

    def __init__(self, limit: int | None = None) -> None:
        """`limit`: an eighth of the files that this process may open, if nothing else is given, within 64 and 1024.

        Why that many: a thousand ranks that start together are all strangers for a moment.
        """
        self._limit = _places() if limit is None else limit
        self._addresses: dict[C, str] = {}
        self._refused: Counter[tuple[str, str]] = Counter()
        self._next_summary_s = 0.0

    def __len__(self) -> int:
        return len(self._addresses)

    def __contains__(self, connection: C) -> bool:
        return connection in self._addresses

    @property
    def is_full(self) -> bool:
        """Whether the next one costs another its place."""
        return len(self._addresses) >= self._limit

    @property
    def has_refused(self) -> bool:
        """Whether there is something for a summary."""
        return bool(self._refused)

    def admit(self, connection: C, address: str) -> C | None:
        """Add a connection; returns the one that has to go for it, which the caller closes and refuses."""
        self._addresses[connection] = address
        if len(self._addresses) <= self._limit:
            return None
        busiest = Counter(self._addresses.values()).most_common(1)[0][0]
        return next(other for other, home in self._addresses.items() if home == busiest)

    def release(self, connection: C) -> None:
        """The connection proved the secret."""
        del self._addresses[connection]

    def refuse(self, connection: C, reason: str) -> None:
        """The connection is closed without a proof."""
        self._refused[self._addresses.pop(connection), reason] += 1

    def summary_due_s(self, now_s: float) -> float | None:
        """When to print the next summary; None if there is nothing to say. Waits a moment, to say it once."""
        if not self._refused:
            return None
        if not self._next_summary_s:
            self._next_summary_s = now_s + _FIRST_SUMMARY_S
        return self._next_summary_s

    def summary(self, now_s: float) -> str:
        """One line about everyone refused since the last one; the next is due a minute later."""
        self._next_summary_s = now_s + _NEXT_SUMMARY_S
        refused, self._refused = self._refused, Counter()
        return describe_refused(refused)


def describe_refused(refused: Counter[tuple[str, str]]) -> str:
    """Who was refused and why, on one line however many there were."""
    homes = list(dict.fromkeys(address for address, _ in refused))
    reasons = Counter[str]()
    for (_, reason), count in refused.items():
        reasons[reason] += count
    shown = ", ".join(homes[:3]) + (f" and {len(homes) - 3} more" if len(homes) > 3 else "")
    total = refused.total()
    if total == 1:
        return f"a connection from {shown} was refused: {next(iter(reasons))}"
    parts = "; ".join(f"{count} × {reason}" for reason, count in reasons.most_common(4))
    return f"{total} connections from {shown} were refused: {parts}"


def _places() -> int:
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(_FEWEST_PLACES, min(_MOST_PLACES, most_files // _SHARE_OF_FILES))
