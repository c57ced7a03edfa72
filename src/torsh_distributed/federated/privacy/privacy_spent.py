"""What rounds cost: ε for a given δ, by the accountant of dp-accounting (privacy loss distributions)."""

from __future__ import annotations

import functools
from typing import Any

from torsh_distributed.errors import missing_extra

_MOST_RELEASES = 1 << 20


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
    library = _library()
    event = library.GaussianDpEvent(noise_multiplier)
    if probability < 1:
        event = library.PoissonSampledDpEvent(probability, event)
    accountant = library.pld.PLDAccountant()
    accountant.compose(event, num_rounds)
    return float(accountant.get_epsilon(delta))


def _library() -> Any:
    try:
        import dp_accounting
        import dp_accounting.pld
    except ImportError as error:
        raise missing_extra("federated", "the account of differential privacy") from error
    return dp_accounting
