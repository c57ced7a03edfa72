"""Who takes part in a round: six ways to choose among the clients that are there.

What a choice uses was measured or counted by the server; a client that was not measured yet counts as the median one.
"""

from __future__ import annotations

import difflib
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

import numpy as np
from typing_extensions import override

from torsh_distributed.errors import ConfigurationError, InvalidArgument
from torsh_distributed.federated.random_seeds import derived_seed

_SHARE_EXPLORED = 0.2


@dataclass(kw_only=True, slots=True)
class ClientFacts:
    """What the server knows of a client; None: not measured yet."""

    client: str
    num_samples: int | None = None
    steps_per_s: float | None = None
    bytes_per_s: float | None = None
    """Of its uploads."""
    turn_s: float | None = None
    """From the order to its answer, the last time."""
    num_chosen: int = 0
    num_delivered: int = 0
    last_round: int = -1
    """In which it was chosen last."""

    def delivered(self, num_samples: int, steps_per_s: float) -> None:
        """An update of it counts."""
        self.num_delivered += 1
        self.num_samples = num_samples
        self.steps_per_s = steps_per_s or self.steps_per_s


class ClientSelection(ABC):
    """Chooses without repeating a client. Pure: the same facts and seed give the same choice, but for `poisson`."""

    name: ClassVar[str]

    @abstractmethod
    def choose(self, clients: Sequence[ClientFacts], count: int, *, seed: int) -> list[str]:
        """The names of `count` clients, or of all if there are fewer."""


class RandomSelection(ClientSelection):
    """Every client with the same chance."""

    name = "random"

    @override
    def choose(self, clients: Sequence[ClientFacts], count: int, *, seed: int) -> list[str]:
        return _draw(clients, [1.0] * len(clients), count, seed)


class RoundRobinSelection(ClientSelection):
    """Those whose last round is longest ago: over time all take part equally often."""

    name = "round_robin"

    @override
    def choose(self, clients: Sequence[ClientFacts], count: int, *, seed: int) -> list[str]:
        # A round may end one turn and begin the next: of its clients, those with fewer rounds are due first.
        order = sorted(clients, key=lambda facts: (facts.last_round, facts.num_chosen))
        return [facts.client for facts in order[:count]]


class _MeasuredSelection(ClientSelection):
    """With a chance in proportion to something that was measured."""

    fact: ClassVar[str]

    @override
    def choose(self, clients: Sequence[ClientFacts], count: int, *, seed: int) -> list[str]:
        return _draw(clients, _filled([getattr(facts, self.fact) for facts in clients]), count, seed)


class DataSelection(_MeasuredSelection):
    """Clients with more samples more often."""

    name = "data"
    fact = "num_samples"


class ComputeSelection(_MeasuredSelection):
    """Clients that train faster more often."""

    name = "compute"
    fact = "steps_per_s"


class NetworkSelection(_MeasuredSelection):
    """Clients with faster links more often."""

    name = "network"
    fact = "bytes_per_s"


class AdaptiveSelection(ClientSelection):
    """Clients that deliver, fast and with many samples, more often; a fifth of the places goes round by turns.

    Why the turns: what was measured once may have changed, and a client that is never asked never shows it.
    """

    name = "adaptive"

    @override
    def choose(self, clients: Sequence[ClientFacts], count: int, *, seed: int) -> list[str]:
        num_turns = min(count, max(1, round(_SHARE_EXPLORED * count)))
        turns = RoundRobinSelection().choose(clients, num_turns, seed=seed)
        rest = [facts for facts in clients if facts.client not in set(turns)]
        speeds = _filled([facts.steps_per_s for facts in rest])
        samples = _filled([facts.num_samples for facts in rest])
        weights = [
            (facts.num_delivered + 1) / (facts.num_chosen + 1) * speed * size
            for facts, speed, size in zip(rest, speeds, samples, strict=True)
        ]
        return turns + _draw(rest, weights, count - num_turns, seed)


class PoissonSelection(ClientSelection):
    """Each client by itself with the same probability, from the system's secret generator.

    Differential privacy accounts for this sampling: nobody can know whether a given client took part. The number of
    clients differs from round to round; `count` is what it comes to on average.
    """

    name = "poisson"

    def __init__(self, probability: float) -> None:
        if not 0 < probability <= 1:
            raise ConfigurationError("a probability is above 0 and at most 1", probability=probability)
        self.probability = probability

    @override
    def choose(self, clients: Sequence[ClientFacts], count: int, *, seed: int) -> list[str]:
        limit = round(self.probability * 2**53)
        return [facts.client for facts in clients if secrets.randbits(53) < limit]


SELECTIONS: dict[str, type[ClientSelection]] = {
    kind.name: kind
    for kind in (
        *(RandomSelection, RoundRobinSelection, DataSelection),
        *(ComputeSelection, NetworkSelection, AdaptiveSelection),
    )
}


def selection_named(name: str) -> ClientSelection:
    """The selection of that name."""
    if name not in SELECTIONS:
        near = difflib.get_close_matches(name, SELECTIONS, 1)
        raise InvalidArgument(
            "there is no way of choosing clients of this name",
            hint=f"did you mean {near[0]}?" if near else f"one of {', '.join(SELECTIONS)}",
            selection=name,
        )
    return SELECTIONS[name]()


def _filled(values: Sequence[float | None]) -> list[float]:
    """The median in place of what is not known."""
    known = [value for value in values if value is not None]
    middle = median(known) if known else 1.0
    return [middle if value is None else float(value) for value in values]


def _draw(clients: Sequence[ClientFacts], weights: Sequence[float], count: int, seed: int) -> list[str]:
    """Without repeating, each next one with a chance in proportion to its weight.

    Exponential arrival times with the weights as rates: the first `count` to arrive are such a draw.
    """
    times = np.random.default_rng(derived_seed(seed, "selection")).exponential(size=len(clients))
    order = np.argsort(times / np.maximum(np.asarray(weights, dtype=float), 1e-300), kind="stable")
    return [clients[index].client for index in order[:count]]
