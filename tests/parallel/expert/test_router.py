"""Capacity over all ranks, against a queue of tokens served one after another."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.parallel.expert.dense_experts import admitted
from torsh_distributed.parallel.expert.router import Gate, admit, capacity_of, count_choices, settle
from torsh_distributed.plan.sections.expert import ExpertConfig


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[list[int]]], int]:
    """Choices by rank, token and choice, with the number of experts; ranks may have no token."""
    num_experts = draw(st.integers(1, 6))
    num_choices = draw(st.integers(1, min(3, num_experts)))
    token = st.permutations(range(num_experts)).map(lambda order: order[:num_choices])
    return draw(st.lists(st.lists(token, max_size=12), min_size=1, max_size=4)), num_experts


@settings(max_examples=150)
@given(batch=batches(), capacity=st.integers(0, 8), reroute=st.booleans())
def test_every_choice_ends_where_one_process_would_put_it(
    batch: tuple[list[list[list[int]]], int], capacity: int, reroute: bool
) -> None:
    by_rank, num_experts = batch
    num_choices = next((len(tokens[0]) for tokens in by_rank if tokens), 1)
    choices = [torch.tensor(tokens, dtype=torch.int64).view(-1, num_choices).t() for tokens in by_rank]
    counts = torch.stack([count_choices(experts, num_experts) for experts in choices])
    admission = admit(counts, capacity, reroute=reroute)
    expected = iter(
        admitted(list(itertools.chain(*by_rank)), num_experts=num_experts, capacity=capacity, reroute=reroute)
    )
    for rank, experts in enumerate(choices):
        settled, is_rerouted = settle(experts, admission, rank=rank, num_experts=num_experts)
        for token in range(experts.shape[1]):
            for choice, (expert, factor) in enumerate(next(expected)):
                assert settled[choice, token] == (num_experts if expert < 0 else expert)
                assert bool(is_rerouted[choice, token]) == (factor == 0.5)
        sent = torch.bincount(settled.flatten(), minlength=num_experts + 1)
        assert sent[:num_experts].tolist() == admission.sends[rank].tolist(), "others would expect other rows"
        num_dropped = int((settled == num_experts).sum())
        assert int(admission.sends[rank].sum()) + num_dropped == experts.numel(), "a token is unaccounted for"


def test_capacity_is_the_share_of_an_expert_times_the_factor() -> None:
    config = ExpertConfig(num_experts=8, num_experts_per_token=2, capacity_factor=1.25)
    assert capacity_of(100, config) == 32  # ceil(100 · 2 / 8 · 1.25)
    assert capacity_of(100, config.replace(overflow="none")) is None
    assert capacity_of(0, config) == 0


def test_without_a_limit_all_are_admitted() -> None:
    counts = torch.tensor([[[3, 0], [1, 2]], [[0, 5], [4, 4]]])
    admission = admit(counts, None, reroute=False)
    assert admission.sends.tolist() == [[4, 2], [4, 9]]
    experts = torch.tensor([[0, 0, 0], [1, 1, 0]])
    settled, is_rerouted = settle(experts, admission, rank=0, num_experts=2)
    assert torch.equal(settled, experts)
    assert not is_rerouted.any()


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
