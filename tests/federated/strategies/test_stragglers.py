"""FedProx's published claim: with 90 % stragglers, using what they did is better than to drop them."""

from __future__ import annotations

import pytest

from tests.federated.strategies.synthetic_points import accuracies


@pytest.mark.matrix
def test_fedprox_is_15_points_better_than_fedavg_that_drops_stragglers() -> None:
    averaged, proximal = accuracies(seed=0, rounds=20, stragglers=0.9)
    assert proximal >= averaged + 0.15
