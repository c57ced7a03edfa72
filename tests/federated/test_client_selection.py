"""Each way of choosing clients has the frequencies that it says: over thousands of seeded rounds."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from torsh_distributed.errors import ConfigurationError, InvalidArgument
from torsh_distributed.federated import ClientFacts, ClientSelection, PoissonSelection
from torsh_distributed.federated.client_selection import SELECTIONS, selection_named

ROUNDS = 4000


def twenty_clients() -> list[ClientFacts]:
    """Client i has i + 1 samples; speed and link go the other way, each by itself."""
    return [
        ClientFacts(client=str(i), num_samples=i + 1, steps_per_s=20.0 - i, bytes_per_s=1.0 + (7 * i) % 20)
        for i in range(20)
    ]


def frequencies(selection: ClientSelection, clients: list[ClientFacts], count: int = 1) -> np.ndarray:
    """How often each client was chosen, as a share of rounds."""
    counts: collections.Counter[str] = collections.Counter()
    for seed in range(ROUNDS):
        chosen = selection.choose(clients, count, seed=seed)
        assert len(set(chosen)) == len(chosen)
        counts.update(chosen)
        for facts in clients:
            if facts.client in chosen:
                facts.last_round = seed
                facts.num_chosen += 1
                facts.num_delivered += 1
    return np.array([counts[facts.client] for facts in clients]) / ROUNDS


def chi_square(found: np.ndarray, expected: np.ndarray) -> float:
    return float((ROUNDS * (found - expected) ** 2 / expected).sum())


LIMIT = 43.8
"""Of chi square with 19 degrees of freedom: beyond it lies one case of a thousand."""


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("random", lambda facts: 1.0),
        ("data", lambda facts: facts.num_samples),
        ("compute", lambda facts: facts.steps_per_s),
        ("network", lambda facts: facts.bytes_per_s),
    ],
)
def test_chances_are_in_proportion(name: str, weight: object) -> None:
    clients = twenty_clients()
    weights = np.array([weight(facts) for facts in clients], dtype=float)  # type: ignore[operator]
    assert chi_square(frequencies(selection_named(name), clients), weights / weights.sum()) < LIMIT


def test_random_choices_of_several_are_even_and_repeat_themselves() -> None:
    clients = twenty_clients()
    found = frequencies(selection_named("random"), clients, count=5)
    assert abs(found - 0.25).max() < 0.03
    choose = selection_named("random").choose
    assert choose(clients, 5, seed=1) == choose(clients, 5, seed=1) != choose(clients, 5, seed=2)


def test_by_turns_all_are_chosen_equally_often() -> None:
    found = frequencies(selection_named("round_robin"), twenty_clients(), count=3)
    assert (found * ROUNDS).max() - (found * ROUNDS).min() <= 1


def test_adaptive_prefers_clients_that_deliver_and_leaves_out_nobody() -> None:
    clients = twenty_clients()
    for facts in clients:
        facts.num_samples, facts.steps_per_s = 10, 1.0
        facts.num_chosen, facts.num_delivered = 10**9, 10**9 if int(facts.client) < 10 else 10**8
    found = frequencies(selection_named("adaptive"), clients, count=5)
    assert found[:10].mean() > 2.5 * found[10:].mean()
    assert found.min() > 0.02, "a fifth of the places goes round by turns"


def test_a_client_that_was_not_measured_counts_as_the_median_one() -> None:
    clients = [ClientFacts(client=str(i), num_samples=size) for i, size in enumerate([1, None, 3, 5, None])]
    found = frequencies(selection_named("data"), clients)
    assert abs(found[1] - 3 / 15) < 0.03
    assert selection_named("network").choose([ClientFacts(client="a")], 3, seed=0) == ["a"]


def test_poisson_takes_each_client_by_itself() -> None:
    clients = twenty_clients()
    selection = PoissonSelection(0.3)
    sizes = [len(selection.choose(clients, 6, seed=0)) for _ in range(ROUNDS)]
    assert abs(np.mean(sizes) - 6) < 0.2
    assert abs(np.var(sizes) - 20 * 0.3 * 0.7) < 0.5, "a binomial number of clients, not a fixed one"


def test_odd_requests_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="did you mean round_robin"):
        selection_named("round_robbin")
    with pytest.raises(ConfigurationError, match="probability"):
        PoissonSelection(1.5)
    assert set(SELECTIONS) == {"random", "round_robin", "data", "compute", "network", "adaptive"}
