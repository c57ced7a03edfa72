"""How clients' privacy is kept: whole updates are clipped, and noise hides whether a client took part or what it sent.

Central: the server clips and adds noise to the sum, so what leaves it is private. Local: each client clips and adds
noise before its update leaves the device, so not even the server needs trust; it takes far more noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.federated.privacy.privacy_spent import most_rounds, sampled_epsilon
from torsh_distributed.federated.privacy.secure_noise import noised, secure_noise


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveClipping:
    """Moves the clip norm until a share of updates is shorter than it (Andrew et al., 2021)."""

    target: float = 0.5
    """The share of updates that shall not be clipped."""

    rate: float = 0.2
    """How fast it moves: C · exp(rate · (target - share))."""

    count_noise: float = 5.0
    """Standard deviation of the noise on the number of updates that were not clipped."""

    def __post_init__(self) -> None:
        if not (0 < self.target < 1 and self.rate > 0 and self.count_noise > 0):
            raise ConfigurationError("target is between 0 and 1; rate and count_noise are above 0", got=repr(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Privacy:
    clip_norm: float
    """Longer updates (Euclidean) are shortened to it. Small: less noise, more bias."""

    noise_multiplier: float
    """Noise in relation to what one client can change. More: smaller ε, slower learning."""

    delta: float
    """The probability that the promise of ε does not hold: well below one over the number of clients."""

    budget: float = math.inf
    """The largest ε; the run ends before the round that would go beyond."""

    def __post_init__(self) -> None:
        for name in ("clip_norm", "noise_multiplier", "budget"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} must be above 0", got=repr(getattr(self, name)))
        if not 0 < self.delta < 1:
            raise ConfigurationError("delta is a probability between 0 and 1", delta=self.delta)


@dataclass(frozen=True, kw_only=True, slots=True)
class CentralPrivacy(_Privacy):
    """The sum of clipped updates gets noise of clip_norm · noise_multiplier, and is divided by the expected count.

    Neighbours differ in one client. The number of clients that answered is never divided by: it would tell who did,
    and a lost client must not lower the noise. Needs `PoissonSelection`, the sampling that is accounted.
    """

    adaptive: AdaptiveClipping | None = None
    """None keeps clip_norm; otherwise it is the first one."""

    @override
    def __post_init__(self) -> None:
        super(CentralPrivacy, self).__post_init__()
        if self.adaptive is not None and not self.update_noise_multiplier > 0:
            raise ConfigurationError("the noise on the count takes all of the privacy", hint="raise count_noise")

    @property
    def update_noise_multiplier(self) -> float:
        """Of the sum of updates: more than `noise_multiplier` where the count is released beside it."""
        if self.adaptive is None:
            return self.noise_multiplier
        rest = self.noise_multiplier**-2 - (2 * self.adaptive.count_noise) ** -2
        return rest**-0.5 if rest > 0 else 0.0

    def epsilon(self, num_rounds: int, probability: float) -> float:
        """What so many rounds cost every client."""
        return sampled_epsilon(self.noise_multiplier, probability, num_rounds, self.delta)

    def most_rounds(self, probability: float) -> float:
        """How many rounds the budget allows."""
        if math.isinf(self.budget):
            return math.inf
        return most_rounds(self.noise_multiplier, probability, self.delta, self.budget)


class CentralNoise:
    """The server's part of central privacy, and its state: the clip norm that moves."""

    def __init__(self, privacy: CentralPrivacy) -> None:
        self._privacy = privacy
        self.clip_norm = privacy.clip_norm

    def private_mean(self, total: Tensor, num_unclipped: int, num_updates: int, expected: float) -> Tensor:
        """The mean to use, from the sum of clipped updates; adapts the clip norm for the next round."""
        mean = noised(total, self.clip_norm * self._privacy.update_noise_multiplier) / expected
        adaptive = self._privacy.adaptive
        if adaptive is not None:
            # Each client counts ±1/2, so one client changes the sum by half.
            shifted = num_unclipped - num_updates / 2 + float(secure_noise(1, adaptive.count_noise))
            share = min(max(shifted / expected + 0.5, 0.0), 1.0)
            self.clip_norm *= math.exp(-adaptive.rate * (share - adaptive.target))
        return mean

    def state(self) -> dict[str, Any]:
        """For the round's file."""
        return {"clip_norm": self.clip_norm}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.clip_norm = state["clip_norm"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalPrivacy(_Privacy):
    """Each client adds noise of 2 · clip_norm · noise_multiplier to every coordinate of its own clipped update.

    Neighbours are any two updates that a client might send, which are up to 2 · clip_norm apart. ε is that of the
    client that was asked most often; one whose budget is spent is not asked any more.
    """

    @property
    def noise_std(self) -> float:
        """Of each coordinate."""
        return 2 * self.clip_norm * self.noise_multiplier

    def epsilon(self, num_rounds: int) -> float:
        """What so many updates cost the client that sent them."""
        return sampled_epsilon(self.noise_multiplier, 1.0, num_rounds, self.delta)

    def most_rounds(self) -> float:
        """How many updates of one client the budget allows."""
        return math.inf if math.isinf(self.budget) else most_rounds(self.noise_multiplier, 1.0, self.delta, self.budget)


def clipped(update: Tensor, clip_norm: float) -> tuple[Tensor, bool]:
    """The update, shortened to `clip_norm` if it is longer, and whether it was left as it is."""
    norm = float(update.to(torch.float64).norm())
    return (update, True) if norm <= clip_norm else (update * (clip_norm / norm), False)
