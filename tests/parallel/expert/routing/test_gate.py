"""The gate: probabilities in one step or two, and what is random in training."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torsh_distributed.parallel.expert.routing.gate import Gate
from torsh_distributed.plan.sections.expert import ExpertConfig

TOKENS = torch.randn(9, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def gate(**values: object) -> Gate:
    torch.manual_seed(0)
    return Gate(6, ExpertConfig(num_experts=8, **values), dtype=torch.float64)  # type: ignore[arg-type]


def test_one_step_is_a_softmax_and_its_z_loss_is_on_logits() -> None:
    one = gate()
    logits = TOKENS @ one.experts.weight.t()
    scores = one(TOKENS)
    torch.testing.assert_close(scores.probabilities, logits.softmax(dim=1))
    torch.testing.assert_close(scores.z_loss, torch.logsumexp(logits, dim=1).square().mean())
    assert scores.candidates is None


def test_two_steps_multiply_group_and_expert() -> None:
    two = gate(gate_groups=4, gate_top_groups=1)
    groups = (TOKENS @ two.groups.weight.t()).softmax(dim=1)
    inside = (TOKENS @ two.experts.weight.t()).view(-1, 4, 2)
    scores = two(TOKENS)
    expected = (groups.unsqueeze(2) * inside.softmax(dim=2)).flatten(1)
    torch.testing.assert_close(scores.probabilities, expected)
    z_losses = [(TOKENS @ two.groups.weight.t()).logsumexp(dim=1), inside.logsumexp(dim=2)]
    torch.testing.assert_close(scores.z_loss, sum(values.square().mean() for values in z_losses))
    best = groups.argmax(dim=1)
    for token, candidates in enumerate(scores.candidates):
        assert candidates.nonzero().flatten().tolist() == [2 * int(best[token]), 2 * int(best[token]) + 1]


def test_learned_groups_are_a_mixture_over_groups() -> None:
    learned = gate(gate_groups=2, gate_grouping="learned")
    groups = (TOKENS @ learned.groups.weight.t()).softmax(dim=1)
    belongs = learned.membership.softmax(dim=1)
    strength = (TOKENS @ learned.experts.weight.t()).exp()
    expected = torch.zeros(9, 8, dtype=torch.float64)
    for group in range(2):
        inside = strength * belongs[:, group]
        expected = expected + groups[:, group : group + 1] * inside / inside.sum(dim=1, keepdim=True)
    scores = learned(TOKENS)
    torch.testing.assert_close(scores.probabilities, expected)
    (scores.probabilities * torch.arange(8.0)).sum().backward()
    assert all(param.grad is not None and param.grad.abs().sum() > 0 for param in learned.parameters())


@pytest.mark.parametrize(
    "values", [{}, {"gate_layers": 2}, {"gate_groups": 4}, {"gate_groups": 2, "gate_grouping": "learned"}]
)
def test_rows_add_up_to_one_for_any_number_of_tokens(values: dict[str, object]) -> None:
    for num_tokens in (0, 1, 9):
        scores = gate(**values)(TOKENS[:num_tokens])
        torch.testing.assert_close(scores.probabilities.sum(dim=1), torch.ones(num_tokens, dtype=torch.float64))
        assert torch.isfinite(scores.z_loss)


def spread_of(one: Gate) -> Tensor:
    return (one(TOKENS).probabilities - one(TOKENS).probabilities).abs().max()


@pytest.mark.parametrize("values", [{"router_jitter": 0.1}, {"gate_dropout": 0.2}])
def test_jitter_and_dropout_are_for_training_only(values: dict[str, object]) -> None:
    one = gate(**values)
    assert spread_of(one) > 1e-4
    one.eval()
    assert spread_of(one) == 0
    torch.testing.assert_close(one(TOKENS).probabilities, gate()(TOKENS).probabilities)


def test_jitter_stays_within_its_bounds() -> None:
    one = gate(router_jitter=0.25)
    factors = one._explored(torch.ones(1000, 6))
    assert 0.75 <= factors.min() < 0.8
    assert 1.2 < factors.max() <= 1.25


def test_the_gate_computes_in_full_precision_under_autocast() -> None:
    one = Gate(6, ExpertConfig(num_experts=8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert one(TOKENS.float()).probabilities.dtype == torch.float32
