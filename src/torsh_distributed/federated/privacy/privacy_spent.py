"""What rounds cost: ε for a given δ, by the accountant of dp-accounting (privacy loss distributions)."""

from __future__ import annotations

import functools
import math
from typing import Any

from torsh_distributed.errors import missing_extra

_MOST_RELEASES = 1 << 20
_INTERVAL = 1e-4
"""Losses are counted in steps of this, as by the library's accountant."""


def sampled_epsilon(noise_multiplier: float, probability: float, num_rounds: int, delta: float) -> float:
    """Rounds in which each client takes part with this probability by itself (Poisson sampling)."""
    if not num_rounds:
        return 0.0
    return _epsilon(noise_multiplier, probability, num_rounds, delta)


def most_rounds(noise_multiplier: float, probability: float, delta: float, budget: float) -> int:
    """How many rounds stay within the budget: the largest number whose ε is at most `budget`."""
    if sampled_epsilon(noise_multiplier, probability, 1, delta) > budget:
        return 0
    low, high = 1, 2
    while high < _MOST_RELEASES and sampled_epsilon(noise_multiplier, probability, high, delta) <= budget:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if sampled_epsilon(noise_multiplier, probability, middle, delta) <= budget:
            low = middle
        else:
            high = middle
    return low


@functools.lru_cache(maxsize=4096)
def _epsilon(noise_multiplier: float, probability: float, num_rounds: int, delta: float) -> float:
    if probability == 1:  # the sum of Gaussian releases is one with less noise, for which there is a formula
        return float(_library().get_epsilon_gaussian(noise_multiplier / math.sqrt(num_rounds), delta))
    return float(_one_round(noise_multiplier, probability).self_compose(num_rounds).get_epsilon_for_delta(delta))


@functools.lru_cache(maxsize=16)
def _one_round(noise_multiplier: float, probability: float) -> Any:
    """The distribution of a round's privacy loss, as the library's accountant makes it; a second's work, done once."""
    losses = _library().pld.privacy_loss_distribution
    return losses.from_gaussian_mechanism(
        standard_deviation=noise_multiplier, value_discretization_interval=_INTERVAL, sampling_prob=probability
    )


def _library() -> Any:
    try:
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.pld.privacy_loss_distribution
    except ImportError as error:
        raise missing_extra("federated", "the account of differential privacy") from error
    return dp_accounting
