"""Rules stand up to f hostile clients, equal their definitions, and refuse too few clients with the inequality."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torsh_distributed.errors import ConfigurationError, InvalidArgument
from torsh_distributed.federated.robust.base import nearest_means
from torsh_distributed.federated.robust.registry import RULES, rule_named

N = 20
Attack = Callable[[Tensor, int], Tensor]


def sign_flip(honest: Tensor, f: int) -> Tensor:
    return (-10 * honest.mean(dim=0)).expand(f, -1)


def little_is_enough(honest: Tensor, f: int) -> Tensor:
    """ALIE: as far from the honest mean as still looks like one of them."""
    s = N // 2 + 1 - f
    z = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor((N - f - s) / (N - f)))
    return (honest.mean(dim=0) - z * honest.std(dim=0)).expand(f, -1)


def inner_product(honest: Tensor, f: int) -> Tensor:
    return (-0.5 * honest.mean(dim=0)).expand(f, -1)


def huge(honest: Tensor, f: int) -> Tensor:
    return torch.full((f, honest.shape[1]), 1e30)


ATTACKS: dict[str, Attack] = {attack.__name__: attack for attack in (sign_flip, little_is_enough, inner_product, huge)}


def honest_updates(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 1.0 + 0.3 * torch.randn(count, 50, generator=generator)


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("name", [name for name in RULES if name != "norm_clipping"])
def test_hostile_clients_move_the_result_little(name: str, attack: str) -> None:
    f = 4 if name == "bulyan" else 6
    for seed in range(3):
        honest = honest_updates(N - f, seed)
        updates = torch.cat([honest, ATTACKS[attack](honest, f)])
        mean = honest.mean(dim=0)
        found = rule_named(name, f).combine(updates)
        worst = 0.45 if name == "krum" else 0.25  # Krum returns one client's update, with all its noise
        assert float((found - mean).abs().mean()) < worst
        assert float(found @ mean) > 0


def test_the_plain_mean_would_have_been_moved() -> None:
    honest = honest_updates(14, 0)
    moved = torch.cat([honest, sign_flip(honest, 6)]).mean(dim=0)
    assert float(moved @ honest.mean(dim=0)) < 0


def test_clipped_norms_bound_what_one_client_can_do() -> None:
    honest = honest_updates(14, 0)
    found = rule_named("norm_clipping", 6).combine(torch.cat([honest, huge(honest, 6)]))
    assert float(found.norm()) < 1.1 * float(honest.norm(dim=1).median())


def krum_by_definition(updates: Tensor, f: int) -> tuple[int, list[float]]:
    """In words of the paper, with loops."""
    n = len(updates)
    scores = []
    for i in range(n):
        others = sorted(float((updates[i] - updates[j]).pow(2).sum()) for j in range(n) if j != i)
        scores.append(sum(others[: n - f - 2]))
    return min(range(n), key=scores.__getitem__), scores


def test_rules_are_their_definitions() -> None:
    f = 2
    for seed in range(5):
        updates = honest_updates(11, seed).double()
        best, scores = krum_by_definition(updates, f)
        torch.testing.assert_close(rule_named("krum", f).combine(updates), updates[best])
        order = sorted(range(11), key=scores.__getitem__)[: 11 - f - 2]
        torch.testing.assert_close(rule_named("multi_krum", f).combine(updates), updates[order].mean(dim=0))
        columns = [sorted(column.tolist()) for column in updates.T]
        torch.testing.assert_close(
            rule_named("median", f).combine(updates), torch.tensor([c[5] for c in columns]).double()
        )
        trimmed = torch.tensor([sum(c[f:-f]) / (11 - 2 * f) for c in columns]).double()
        torch.testing.assert_close(rule_named("trimmed_mean", f).combine(updates), trimmed)
        point = rule_named("geometric_median", f).combine(updates)
        here = float((updates - point).norm(dim=1).sum())
        for direction in torch.eye(50).double()[:5]:
            assert here <= float((updates - (point + 1e-3 * direction)).norm(dim=1).sum())


def test_bulyan_is_its_definition() -> None:
    f, n = 2, 11
    for seed in range(3):
        updates = honest_updates(n, seed).double()
        left, chosen = list(range(n)), []
        while len(chosen) < n - 2 * f:
            best, _ = krum_by_definition(updates[left], f) if len(left) - f - 2 > 0 else (0, [])
            chosen.append(left.pop(best))
        expected = []
        for column in updates[chosen].T:
            values = sorted(column.tolist())
            median = values[len(values) // 2]
            nearest = sorted(values, key=lambda value: abs(value - median))[: n - 4 * f]
            expected.append(sum(nearest) / len(nearest))
        torch.testing.assert_close(rule_named("bulyan", f).combine(updates), torch.tensor(expected).double())


def test_the_order_of_clients_does_not_matter() -> None:
    """With f = 3: for f = 2 Bulyan's last choice is between the two nearest of five, whose scores are equal."""
    updates = honest_updates(15, 3).double()
    shuffled = updates[torch.randperm(15, generator=torch.Generator().manual_seed(1))]
    for name in RULES:
        rule = rule_named(name, 3)
        torch.testing.assert_close(rule.combine(updates), rule.combine(shuffled))


def test_mixing_brings_updates_of_clients_that_differ_together() -> None:
    """Two kinds of honest clients: Krum takes one kind's side, after mixing it is between them."""
    kinds = torch.cat([honest_updates(7, 0), honest_updates(7, 1) + 2])
    mean = kinds.mean(dim=0)
    updates = torch.cat([kinds, sign_flip(kinds, 6)])
    rule = rule_named("krum", 6)
    alone = float((rule.combine(updates) - mean).norm())
    rule.mixing = True
    assert float((rule.combine(updates) - mean).norm()) < 0.5 * alone
    assert torch.equal(nearest_means(kinds.double(), 1), kinds.double())


@pytest.mark.parametrize(("name", "f"), list(itertools.product(RULES, [0, 1, 3])))
def test_too_few_clients_are_refused_with_the_inequality(name: str, f: int) -> None:
    rule = rule_named(name, f)
    assert rule.combine(honest_updates(rule.fewest, 0)).isfinite().all()
    with pytest.raises(ConfigurationError, match=f"{name} needs n .* with f = {f} that is {rule.fewest} updates"):
        rule.combine(honest_updates(rule.fewest - 1, 0) if rule.fewest > 1 else torch.empty(0, 3))


def test_odd_requests_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="negative"):
        rule_named("median", -1)
    with pytest.raises(InvalidArgument, match="did you mean bulyan"):
        rule_named("bulian", 1)
