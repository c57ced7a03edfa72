"""A model trained with f of 20 clients hostile is about as good as one without them, by every robust rule."""

from __future__ import annotations

import pytest

from tests.federated.robust.hostile_digits import NOT_FINITE, accuracy
from torsh_distributed.federated.robust.registry import rule_named

pytestmark = [pytest.mark.matrix, pytest.mark.needs_library("sklearn")]
ROUNDS = 80


@pytest.mark.parametrize(("name", "hostile"), [("median", 6), ("trimmed_mean", 6), ("multi_krum", 6), ("bulyan", 4)])
def test_an_attack_costs_two_points_at_most(name: str, hostile: int) -> None:
    """Clients whose data look alike. An inner product against the honest mean slows training down: it costs more."""
    rule = rule_named(name, hostile)
    rule.mixing = True
    clean = accuracy(rule, None, alpha=None, seed=0, rounds=ROUNDS)
    assert clean > 0.93
    for attack, most in {"sign_flip": 0.02, "little_is_enough": 0.02, NOT_FINITE: 0.02, "inner_product": 0.04}.items():
        assert accuracy(rule, attack, alpha=None, seed=0, rounds=ROUNDS) > clean - most, attack


def test_the_mean_does_not_survive_the_same_attack() -> None:
    rule = rule_named("trimmed_mean", 6)
    rule.hostile = 0  # nothing is trimmed
    from tests.federated.robust import hostile_digits as digits

    attacked = digits.AttackedRule(rule, digits.sign_flip)
    attacked.hostile = 6
    assert accuracy(attacked, None, alpha=None, seed=0, rounds=10) < 0.5
