"""A federated run as its rounds tell it: what the page shows, and the run's metrics."""

from __future__ import annotations

from collections import deque
from typing import Any

from torsh_distributed import events
from torsh_distributed.observe.job.rank_view import ValueKey, finite

_SHOWN_ROUNDS = 200
_SHOWN_LINKS = 20
"""The slowest: a round waits for them."""


class FederatedAccount:
    """Totals of all rounds, and the newest ones."""

    def __init__(self) -> None:
        self._rounds: deque[events.FederatedRoundEvent] = deque(maxlen=_SHOWN_ROUNDS)
        self._num_rounds = self._num_updates = self._num_lost = self._bytes_up = self._bytes_down = 0

    def take(self, event: events.FederatedRoundEvent) -> None:
        """A round was accepted."""
        self._rounds.append(event)
        self._num_rounds += 1
        self._num_updates += event.num_updates
        self._num_lost += sum(event.failures.values())
        self._bytes_up += event.bytes_up
        self._bytes_down += event.bytes_down

    def summary(self) -> dict[str, Any] | None:
        """As plain JSON; None if there was no round."""
        if not self._rounds:
            return None
        rounds = [
            {
                "round": one.round,
                "time": one.time,
                "num_chosen": one.num_chosen,
                "num_updates": one.num_updates,
                "num_attempts": one.num_attempts,
                "failures": dict(one.failures),
                "figures": {name: finite(value) for name, value in one.figures.items()},
                "bytes_up": one.bytes_up,
                "bytes_down": one.bytes_down,
                "duration_s": one.duration_s,
                "epsilon": finite(one.epsilon),
                "num_planned": one.num_planned,
                "links": _slowest(one.links),
            }
            for one in self._in_order()
        ]
        return {
            "num_rounds": self._num_rounds,
            "num_planned": rounds[-1]["num_planned"],
            "num_updates": self._num_updates,
            "num_lost": self._num_lost,
            "bytes_up": self._bytes_up,
            "bytes_down": self._bytes_down,
            "epsilon": rounds[-1]["epsilon"],
            "rounds": rounds,
        }

    def _in_order(self) -> list[events.FederatedRoundEvent]:
        """A run that was continued has several files, which are read in any order."""
        return sorted(self._rounds, key=lambda one: one.round)

    def values(self) -> dict[ValueKey, float]:
        """As metrics; none if there was no round."""
        if not self._rounds:
            return {}
        newest = self._in_order()[-1]
        values: dict[ValueKey, float] = {
            ("torsh_federated_rounds", ()): self._num_rounds,
            ("torsh_federated_updates", ()): self._num_updates,
            ("torsh_federated_lost_updates", ()): self._num_lost,
            ("torsh_federated_bytes", ("up",)): self._bytes_up,
            ("torsh_federated_bytes", ("down",)): self._bytes_down,
            ("torsh_federated_round_seconds", ()): newest.duration_s,
        }
        if newest.epsilon is not None:
            values["torsh_federated_epsilon", ()] = newest.epsilon
        values.update({("torsh_federated_figure", (name,)): value for name, value in newest.figures.items()})
        values.update(
            {("torsh_federated_link_bytes_per_second", (name,)): rate for name, rate in _slowest(newest.links).items()}
        )
        return values


def _slowest(links: dict[str, float]) -> dict[str, float]:
    return dict(sorted(links.items(), key=lambda one: one[1])[:_SHOWN_LINKS])
